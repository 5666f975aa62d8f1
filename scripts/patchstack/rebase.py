# SPDX-License-Identifier: Apache-2.0
"""Carry the stack to another release, commit by commit, with git's own 3-way merge and recorded resolutions (rerere).

The work tree lies at build/rebase-<tag> of the project. What is done is read from its commits (`Topic:` trailers), so a
killed run loses at most the patch it was on; state.json in its .git keeps what commits cannot say: where from, and which
topics were skipped. Resolutions are kept in rerere/ of the project. patches/<tag>/ appears in one step at the end.
"""
import hashlib
import json
import os
import pathlib
import re
import shutil
from dataclasses import dataclass, replace

from . import export, files, stack
from .drift import UPSTREAM, PatchDrift, analyse, pull_requests
from .errors import Conflict, Refused, Usage
from .git import Git
from .lock import write_atomic
from .pins import Base
from .releases import Release
from .report import Ui
from .series import load_series
from .upstream import Upstream, downloaded

_MERGE = ("-c", "rerere.enabled=true", "-c", "rerere.autoUpdate=true", "-c", "merge.renames=true", "-c", "diff.renames=true")
_NEW, _OLD, _OLD_BASE = "refs/patchstack/base", "refs/patchstack/old", "refs/patchstack/old-base"


@dataclass(frozen=True)
class Rebase:
    """A rebase in progress. `skipped`: topic -> the series line that replaces it."""

    tree: pathlib.Path
    git: Git
    from_tag: str
    to: Base
    skipped: dict[str, str]

    def save(self) -> None:
        fields = ("tag", "version", "commit", "sdist_sha256", "repository")
        data = {"schema": 1, "from": self.from_tag, "to": {f: getattr(self.to, f) for f in fields}, "overlay": list(self.to.overlay), "skipped": self.skipped}
        write_atomic(self.tree / ".git" / "state.json", json.dumps(data, indent=1).encode())


def folder_of(root: pathlib.Path, tag: str) -> pathlib.Path:
    return root / "build" / f"rebase-{tag}"


def find(root: pathlib.Path, ui: Ui) -> Rebase:
    """The rebase in progress. Raises Usage if there is none, or more than one. A damaged state counts as absent."""
    found = []
    for tree in sorted((root / "build").glob("rebase-*")):
        try:
            data = json.loads((tree / ".git" / "state.json").read_text(encoding="utf-8"))
            to = Base(**data["to"], default=False, overlay=tuple(data["overlay"]), folder=root / "patches" / data["to"]["tag"], overlay_root=root / "vllm_overlay")
            found.append(Rebase(tree, Git(tree, git_dir=tree / ".git", work_tree=tree, log=ui.git), data["from"], to, data["skipped"]))
        except (OSError, ValueError, KeyError, TypeError):
            ui.note(f"{tree} has no readable state and is not a rebase in progress; `rebase --to` starts it again")
    if len(found) != 1:
        raise Usage("no rebase is in progress" if not found else f"several are in progress: {', '.join(r.to.tag for r in found)}", "python apply.py rebase --to REF" if not found else "abort all but one by removing its folder")
    return found[0]


def start(root: pathlib.Path, base: Base, release: Release, old: Upstream, ui: Ui) -> Rebase:
    """Make the work tree: the new release with the overlay on it, and the old stack as commits beside it."""
    to = _pin(release, base, root)
    if to.folder.exists():
        raise Refused(f"{to.folder} exists already", "choose another release, or move that folder away first")
    tree = folder_of(root, to.tag)
    if (tree / ".git" / "state.json").exists():
        raise Refused(f"a rebase to {to.tag} is in progress at {tree}", "python apply.py rebase --continue, --skip or --abort")
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    stack_files = stack.read_stack(base)
    with files.locked(tree.parent, ui.note), files.scratch_beside(tree) as scratch:
        new = scratch / "tree"
        new.mkdir()
        git = Git(new, git_dir=new / ".git", work_tree=new, log=ui.git)
        git.run("init", "--quiet", "--initial-branch=dcp-stack", ".")
        files.link_objects(release.upstream.git_dir, new / ".git")
        files.link_objects(old.git_dir, new / ".git")
        shallow = {line for u in (old, release.upstream) if (u.git_dir / "shallow").exists() for line in (u.git_dir / "shallow").read_text().split()}
        if shallow:
            (new / ".git" / "shallow").write_text("".join(f"{line}\n" for line in sorted(shallow)))
        built = stack.build(git, old.commit, stack_files.patches, stack_files.overlay)
        tip = stack.build(git, release.upstream.commit, (), stack_files.overlay).commit
        for ref, commit in ((_NEW, release.upstream.commit), (_OLD, built.commit), (_OLD_BASE, old.commit), ("refs/heads/dcp-stack", tip)):
            git.run("update-ref", ref, commit)
        git.run("config", "patchstack.tag", to.tag)
        git.run("reset", "--quiet", "--hard", "HEAD")
        begun = Rebase(new, git, base.tag, to, {})
        begun.save()
        _bring_resolutions(root, new)
        os.rename(new, tree)
    return find(root, ui)


def _pin(release: Release, like: Base, root: pathlib.Path) -> Base:
    """The base.toml of the release, with the hash and commit of what was fetched."""
    base = release.base
    if not base.pinned:
        path = downloaded(base)
        sha = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        match = re.search(rb"commit_id = 'g?([0-9a-f]{7,40})'", release.upstream.version_file or b"")
        if not sha or not match:
            raise Refused(f"{release.name} has no sdist to pin: its hash and commit are not known", "rebase onto a release of the package index")
        base = replace(base, sdist_sha256=sha, commit=match[1].decode())
    return replace(base, default=False, overlay=like.overlay, folder=root / "patches" / base.tag, overlay_root=root / "vllm_overlay")


def topics_done(work: Rebase) -> list[str]:
    return work.git.text("log", "--reverse", "--format=%(trailers:key=Topic,valueonly,separator=)", f"{_NEW}..HEAD").split()


def _old_commits(work: Rebase) -> dict[str, str]:
    """topic -> commit of the old stack, in order, without the overlay."""
    lines = work.git.text("log", "--reverse", "--format=%H %(trailers:key=Topic,valueonly,separator=)", f"{_OLD_BASE}..{_OLD}").splitlines()
    return {topic: commit for commit, topic in (line.split(" ") for line in lines) if topic != stack.OVERLAY_TOPIC}


def advance(work: Rebase, root: pathlib.Path, ui: Ui) -> None:
    """Carry every patch that is left. Raises Conflict where a human has to decide."""
    _unlock(work)
    if _picking(work):
        _conclude(work, root)
    done = set(topics_done(work)) | work.skipped.keys()
    todo = [(t, c) for t, c in _old_commits(work).items() if t not in done]
    for number, (topic, commit) in enumerate(todo):
        ui.progress(f"carrying to {work.to.tag}", number, len(todo))
        ran = work.git.try_run(*_MERGE, "cherry-pick", "--allow-empty", "--keep-redundant-commits", commit)
        if ran.returncode and not _picking(work):
            raise Refused(f"git could not start to carry {topic}: {ran.stderr.decode('utf-8', 'replace').strip()}", f"git -C {work.tree} status")
        if _picking(work):
            if _unmerged(work):
                raise Conflict(_describe(work, topic), f"edit the files in {work.tree}, `git add` them, then: python apply.py rebase --continue   (or --skip to leave {topic} out, --abort to give up)")
            _conclude(work, root)
        if work.git.text("rev-parse", "HEAD^{tree}") == work.git.text("rev-parse", "HEAD^^{tree}"):
            work.git.run("reset", "--quiet", "--hard", "HEAD^")
            raise Conflict(f"{topic}: nothing is left of it on {work.to.tag}: upstream has the change (proof: empty after a 3-way merge)",
                           f"retire it: python apply.py rebase --skip   (the series will say `upstream {topic} {work.to.tag}`)")  # fmt: skip
    ui.progress(f"carrying to {work.to.tag}", len(todo), len(todo))
    _keep_resolutions(root, work.tree)


def _unlock(work: Rebase) -> None:
    (work.tree / ".git" / "index.lock").unlink(missing_ok=True)  # only a killed run of ours leaves one: the folder is locked


def _picking(work: Rebase) -> bool:
    return (work.tree / ".git" / "CHERRY_PICK_HEAD").exists()


def _unmerged(work: Rebase) -> list[str]:
    return work.git.text("diff", "--name-only", "--diff-filter=U").splitlines()


def _conclude(work: Rebase, root: pathlib.Path) -> None:
    """Commit a pick whose conflicts are resolved, and keep the resolution."""
    if left := _unmerged(work):
        raise Conflict(f"still unresolved: {', '.join(left)}", f"edit them in {work.tree}, `git add` them, then: python apply.py rebase --continue")
    marked = work.git.try_run("diff", "--check", "--cached").stdout.decode("utf-8", "replace")
    if "conflict marker" in marked:
        raise Conflict("a conflict marker was added:\n" + "\n".join(line for line in marked.splitlines() if "conflict marker" in line), f"take it out in {work.tree}, `git add`, then: python apply.py rebase --continue")
    work.git.run(*_MERGE, "commit", "--quiet", "--no-verify", "--allow-empty", "--reuse-message=CHERRY_PICK_HEAD")
    _keep_resolutions(root, work.tree)


def _describe(work: Rebase, topic: str) -> str:
    files_ = "".join(f"\n- {path}" for path in _unmerged(work))
    return f"{topic} conflicts with {work.to.tag}:{files_}"


def current_topic(work: Rebase) -> str | None:
    """The topic that the rebase stopped at."""
    done = set(topics_done(work)) | work.skipped.keys()
    return next((t for t in _old_commits(work) if t not in done), None)


def skip(work: Rebase, base: Base, drift: PatchDrift | None, ui: Ui) -> tuple[Rebase, str]:
    """Leave the present topic out. With a sign that upstream has it, the series says so; else it says `n/a`."""
    topic = current_topic(work)
    if topic is None:
        raise Usage("every patch is carried: there is nothing to skip", "python apply.py rebase --continue")
    _unlock(work)
    if _picking(work):
        work.git.run("cherry-pick", "--abort")
    patch = next(p for p in stack.read_stack(base).patches if p.topic == topic)
    numbers = pull_requests(patch)
    taken = drift is not None and (drift.state == UPSTREAM or drift.signals)
    line = f"upstream {topic} {work.to.tag} {f'vllm-project/vllm#{numbers[0]}' if numbers else 'unknown'}" if taken else f"n/a {topic} left out when the stack was carried to {work.to.tag}"
    skipped = replace(work, skipped=work.skipped | {topic: line})
    skipped.save()
    return skipped, line


def propose(work: Rebase, base: Base, old: Upstream, new: Upstream, ui: Ui) -> dict[str, PatchDrift]:
    """What `drift` says of each patch: the proof for a retirement."""
    report = analyse(stack.read_stack(base), old, new, work.to.tag, work.to.version, None, ui)
    return {p.topic: p for p in report.patches}


def finish(work: Rebase, base: Base, root: pathlib.Path, ui: Ui) -> str:
    """Write patches/<tag>/ in one step, prove the round trip, and return git's range-diff of old and new stack."""
    with files.locked(work.to.folder.parent, ui.note), files.scratch_beside(work.to.folder) as scratch:
        new = scratch / work.to.tag
        new.mkdir()
        (new / "base.toml").write_text(_base_toml(work.to), encoding="utf-8")
        lines = [work.skipped.get(line.strip().removesuffix(".patch"), line) for line in load_series(base.folder).text.splitlines()]
        (new / "series").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for topic in topics_done(work):
            if topic != stack.OVERLAY_TOPIC:
                shutil.copy2(base.folder / f"{topic}.patch", new)
        planned = export.plan(work.tree, replace(work.to, folder=new), False, ui)
        for patch in planned.patches:
            patch.path.write_bytes(patch.data)
        (new / "series").write_text(planned.series_text, encoding="utf-8")
        (new / "lock.json").write_text(planned.lock_text, encoding="utf-8")
        os.rename(new, work.to.folder)
    return work.git.text("range-diff", "--no-color", f"{_OLD_BASE}..{_OLD}", f"{_NEW}..HEAD")


def _base_toml(base: Base) -> str:
    overlay = "".join(f'    "{p}",\n' for p in base.overlay)
    return (f'# The pinned upstream release. `commit` is as long as the sdist names it.\ntag = "{base.tag}"\nversion = "{base.version}"\ncommit = "{base.commit}"\n'
            f'sdist_sha256 = "{base.sdist_sha256}"\nrepository = "{base.repository}"\ndefault = false\n# Files of vllm_overlay/ that this base takes.\n'
            f"overlay = [\n{overlay}]\n")  # fmt: skip


def abort(work: Rebase) -> None:
    """Forget the rebase. Nothing outside its folder was written, but the resolutions already recorded."""
    trash = work.tree.with_name(f".{work.tree.name}-aborted")
    os.rename(work.tree, trash)  # in one step: a kill in the middle of the removal leaves no half state
    shutil.rmtree(trash, ignore_errors=True)


def _bring_resolutions(root: pathlib.Path, tree: pathlib.Path) -> None:
    if (root / "rerere").is_dir():
        shutil.copytree(root / "rerere", tree / ".git" / "rr-cache", dirs_exist_ok=True)


def _keep_resolutions(root: pathlib.Path, tree: pathlib.Path) -> None:
    """Copy resolutions (conflict and answer) into the project, where they are committed."""
    for post in sorted((tree / ".git" / "rr-cache").glob("*/postimage")):
        target = root / "rerere" / post.parent.name
        if not (target / "postimage").exists():
            write_atomic(target / "preimage", (post.parent / "preimage").read_bytes())
            write_atomic(target / "postimage", post.read_bytes())


def done(work: Rebase) -> None:
    """The rebase is over: the tree stays for a look, the state goes."""
    (work.tree / ".git" / "state.json").unlink()
