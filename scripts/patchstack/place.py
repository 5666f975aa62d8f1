# SPDX-License-Identifier: Apache-2.0
"""Put a built tree where the user wants it, in one step, and take it back.

1. Beside the target, make the new directory: a fresh repository, or a linked copy of the present one.
2. There, build the commits, check them, set the refs, check the files out.
3. Rename it into place, or swap it with the present directory. A run killed before 3 changed nothing; one killed after
   leaves only a directory to remove, which the next run does.

State lives in git: refs/patchstack/base and refs/patchstack/applied, `patchstack.tag` and `patchstack.before` in the configuration.
"""
import os
import pathlib
from collections.abc import Callable

from . import files
from .errors import Refused
from .git import Git
from .pins import Base
from .report import Ui
from .stack import Built
from .upstream import Upstream

BASE_REF = "refs/patchstack/base"
APPLIED_REF = "refs/patchstack/applied"
BRANCH = "dcp-stack"
UPSTREAM_BRANCH = "upstream"


def is_fresh(target: pathlib.Path) -> bool:
    """Whether `target` is absent or an empty directory."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def create(target: pathlib.Path, base: Base, upstream: Upstream, make: Callable[[Git], Built], ui: Ui) -> Built:
    """Make `target` from scratch. `make(git)` builds and checks the commits in the new repository."""
    files.check_writable(target.parent)
    with files.locked(target.parent, ui.note), files.scratch_beside(target) as scratch:
        new = scratch / "tree"
        new.mkdir()
        git = Git(new, git_dir=new / ".git", work_tree=new, log=ui.git)
        git.run("init", "--quiet", f"--initial-branch={UPSTREAM_BRANCH}", ".")
        files.link_objects(upstream.git_dir, new / ".git")
        built = make(git)
        git.run("update-ref", f"refs/heads/{UPSTREAM_BRANCH}", built.base_commit)
        _point_at(git, base, built, before=UPSTREAM_BRANCH)
        ui.step(f"writing the tree ({target})")
        git.run("reset", "--quiet", "--hard", "HEAD")
        if upstream.version_file is not None:  # git-ignored upstream; without it `import vllm` knows no version
            (new / "vllm" / "_version.py").write_bytes(upstream.version_file)
        os.rename(new, target)  # fails, and changes nothing, if somebody made the target meanwhile
    return built


def _point_at(git: Git, base: Base, built: Built, before: str) -> None:
    git.run("update-ref", f"refs/heads/{BRANCH}", built.commit)
    git.run("update-ref", BASE_REF, built.base_commit)
    git.run("update-ref", APPLIED_REF, built.commit)
    git.run("config", "patchstack.tag", base.tag)
    git.run("config", "patchstack.before", before)
    git.run("symbolic-ref", "HEAD", f"refs/heads/{BRANCH}")


def repository_of(target: pathlib.Path, ui: Ui) -> Git:
    """The git repository whose top level is `target`. Raises Refused for anything else."""
    dot_git = target / ".git"
    if dot_git.is_file():
        raise Refused(f"{target} is a linked worktree or a submodule of another repository", "apply to a new --dest, with --source pointing here if you like")
    if not dot_git.is_dir():
        raise Refused(f"{target} exists and is no git repository", "choose another --dest, or give it as --source")
    return Git(target, git_dir=dot_git, work_tree=target, log=ui.git)


def refuse_dirty(git: Git, target: pathlib.Path, coming: set[str]) -> None:
    """Refuse local changes, and untracked files that stand where a new file of the stack goes."""
    changed = dirty_paths(git)
    in_the_way = sorted(p for p in coming if os.path.lexists(target / p) and not git.ok("ls-files", "--error-unmatch", "--", p))
    if changed or in_the_way:
        shown = "".join(f"\n- {p}" for p in changed[:8]) + (f"\n- and {len(changed) - 8} more" if len(changed) > 8 else "")
        shown += "".join(f"\n- {p} (untracked, where the stack puts a file)" for p in in_the_way)
        raise Refused(f"{target} has local changes:{shown}", f"commit or stash them (`git -C {target} stash -u`), then run the same command again; nothing was changed")


def dirty_paths(git: Git) -> list[str]:
    """Tracked paths that differ from HEAD, in index or work tree."""
    out = git.run("status", "--porcelain=v1", "-z", "--untracked-files=no", "--ignore-submodules=none", "--no-renames")
    return [record[3:] for record in out.decode("utf-8", "surrogateescape").split("\0") if record]


def replace(target: pathlib.Path, change: Callable[[Git], None], ui: Ui) -> None:
    """Swap `target` for a linked copy of it in which `change(git)` has moved the refs; the files follow."""
    target = target.resolve()
    inside = pathlib.Path.cwd().resolve().is_relative_to(target)
    files.check_writable(target.parent)
    with files.locked(target.parent, ui.note), files.scratch_beside(target) as scratch:
        new = scratch / "tree"
        ui.step(f"preparing a copy of {target}")
        files.linked_tree(target, new)
        git = Git(new, git_dir=new / ".git", work_tree=new, log=ui.git)
        before = git.text("rev-parse", "HEAD")
        git.try_run("update-index", "-q", "--refresh")  # where links were not possible, inodes differ
        change(git)
        after = git.text("rev-parse", "HEAD")
        _refuse_overwriting(git, target, before, after)
        git.run("read-tree", "-m", "-u", before, after)
        if inside:
            os.chdir("/")
        files.exchange(new, target)
    if inside:
        ui.note("your shell stands in the directory that was replaced: enter it again with `cd \"$PWD\"`")


def _refuse_overwriting(git: Git, target: pathlib.Path, before: str, after: str) -> None:
    """Refuse when a file that comes with `after` would replace one that git does not track: git keeps those, but not ignored ones."""
    names = {kind: set(git.text("diff-tree", "-r", "-z", "--name-only", "--no-renames", f"--diff-filter={kind}", before, after).split("\0")) - {""} for kind in "AD"}
    in_the_way = set()
    for path in names["A"]:
        parents = [str(p) for p in pathlib.PurePosixPath(path).parents][:-1]
        in_the_way |= {p for p in parents if os.path.lexists(target / p) and not (target / p).is_dir()} - names["D"]
        in_the_way |= {path} if os.path.lexists(target / path) else set()
    if in_the_way:
        raise Refused(f"{target} has untracked files where files would be put: {', '.join(sorted(in_the_way))}", "move them away, then run the same command again; nothing was changed")


def point_branch(git: Git, base: Base, built: Built) -> None:
    """In the copy: put the stack's branch at `built` and remember where HEAD was."""
    before = git.try_run("symbolic-ref", "--short", "--quiet", "HEAD").stdout.decode().strip()
    if before == BRANCH:
        before = git.text("config", "--default", UPSTREAM_BRANCH, "patchstack.before")
    _point_at(git, base, built, before=before or git.text("rev-parse", "HEAD"))


def point_back(git: Git) -> None:
    """In the copy: put HEAD back where it was before `apply`, and forget the stack."""
    base = git.text("rev-parse", BASE_REF)
    before = git.text("config", "--default", "", "patchstack.before")
    if before and git.ok("show-ref", "--verify", "--quiet", f"refs/heads/{before}") and git.text("rev-parse", f"refs/heads/{before}") == base:
        git.run("symbolic-ref", "HEAD", f"refs/heads/{before}")
    else:
        git.run("update-ref", "--no-deref", "HEAD", base)
    for ref in (f"refs/heads/{BRANCH}", BASE_REF, APPLIED_REF):
        git.run("update-ref", "-d", ref)
    git.try_run("config", "--remove-section", "patchstack")  # somebody may have removed it already
