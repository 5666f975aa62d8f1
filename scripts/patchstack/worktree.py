# SPDX-License-Identifier: Apache-2.0
"""What a git work tree holds, by reading its files: HEAD's list of them, what differs from it, and whether HEAD's objects are what they say.

git's own answer rests on the index: a file whose size and times were put back, or that is marked assume-unchanged or
skip-worktree, counts as unchanged there.
"""
import pathlib
from collections.abc import Collection
from dataclasses import dataclass

from . import foreign, workspace
from .disk import SUBMODULE, Disk, tree_id
from .errors import Refused, fatal_first
from .git import Git
from .patchfile import unsafe_path


@dataclass(frozen=True)
class Seen:
    """`files`: path -> mode and blob at HEAD, of every path or of those that were asked for. `dirty`: tracked paths that differ from HEAD on the
    disk or in the index. `unread`: how many paths of HEAD are not checked out (sparse); None if not every file was read. `sparse`: those of the
    paths that were asked for which are not checked out."""

    head: str
    tree: str
    files: dict[str, str]
    dirty: tuple[str, ...]
    unread: int | None
    sparse: tuple[str, ...] = ()


def look(top: pathlib.Path, git: Git) -> Seen | None:
    """Read every file of the work tree `top` of `git` (from foreign.opened); None if it has no commit. Raises Refused where the objects of HEAD are damaged."""
    head = git.resolve("HEAD^{commit}")
    if head is None:
        return None
    listed = git.try_run("ls-tree", "-r", "-z", head)
    tree = git.resolve(f"{head}^{{tree}}")
    files = {path: f"{mode} {oid}" for mode, oid, path in _records(listed.stdout, 2)}
    if listed.returncode or tree_id(files) != tree:
        why = "".join(f"\n  {line}" for line in fatal_first(listed.stderr.decode("utf-8", "replace")))
        raise Refused(f"the objects of {top} are damaged, or some are missing: HEAD does not list the tree {tree}{why}", f"git -C {top} fsck   shows what; a new clone mends it")
    index, absent = _index(git)
    staged = {path for path in files.keys() | index.keys() if files.get(path) != index.get(path)}
    found = Disk(top).blobs(files.keys() | index.keys())
    differ = {path for path, blob in found.items() if blob != files.get(path) and not (blob is None and path in absent)}
    return Seen(head, tree, files, _really(top, git, files, found, differ, staged), sum(1 for path in files if found.get(path) is None))


def glance(top: pathlib.Path, git: Git, paths: Collection[str]) -> Seen | None:
    """Read the files `paths` and those that git takes for changed: enough where nothing is vouched for, to see what must not be overwritten."""
    done = git.try_run("rev-parse", "HEAD^{commit}", "HEAD^{tree}")
    if done.returncode:
        return None
    head, tree = done.stdout.decode().split()
    # Differences between HEAD and index, or index and disk by size and times. A submodule counts when it is at another commit; git does not run in it.
    compared = git.start("diff-index", "--name-only", "-z", "--no-renames", "--ignore-submodules=dirty", head, env={"GIT_WORK_TREE": str(top)})
    files = git.blobs(head, sorted(paths))
    touched = set(compared.text().split("\0")) - {""}
    files |= git.blobs(head, sorted(touched - files.keys()))
    found = Disk(top).blobs({*files, *touched})
    differ = {path for path, blob in found.items() if blob != files.get(path)}
    missing = {path for path in files if found[path] is None}
    index, absent = _index(git, touched | missing) if touched or missing else ({}, set())
    staged = {path for path in touched if files.get(path) != index.get(path)}
    dirty = _really(top, git, files, found, {path for path in differ if not (found[path] is None and path in absent)} & {*files, *index}, staged)
    return Seen(head, tree, files, dirty, None, tuple(sorted(missing & absent)))


def _really(top: pathlib.Path, git: Git, files: dict[str, str], found: dict[str, str | None], differ: set[str], staged: set[str]) -> tuple[str, ...]:
    """What of `differ` is an edit, with what is staged."""
    differ = differ - _converted(git, Disk(top), files, differ)
    submodules = {path for path in differ if found[path] == SUBMODULE and files.get(path, "").startswith(SUBMODULE)}
    return tuple(sorted(staged | {path for path in differ if path not in submodules or not _same_submodule(top / path, files[path], git)}))


def _records(out: bytes, columns: int):
    """(the first column, column number `columns`, path) of each record of ls-tree or ls-files."""
    for record in out.decode("utf-8", "surrogateescape").split("\0"):
        if record:
            meta, path = record.split("\t", 1)
            words = meta.split(" ")
            yield words[0], words[columns], path


def _index(git: Git, paths: Collection[str] = ()) -> tuple[dict[str, str], set[str]]:
    """(path -> mode and blob in the index, paths that are marked as not checked out). An unmerged path has no blob."""
    index, absent = {}, set()
    for record in git.run("ls-files", "--stage", "-v", "-z", "--", *paths, env={"GIT_LITERAL_PATHSPECS": "1"}).decode("utf-8", "surrogateescape").split("\0"):
        if record:
            meta, path = record.split("\t", 1)
            tag, mode, oid, stage = meta.split(" ")
            index[path] = f"{mode} {oid}" if stage == "0" else "unmerged"
            if tag in "Ss":
                absent.add(path)
    return index, absent


def _same_submodule(folder: pathlib.Path, recorded: str, git: Git) -> bool:
    """Whether a submodule is at the recorded commit, or not checked out. What is in it is not looked at."""
    place = foreign.find(folder) if (folder / ".git").exists() else None
    if place is None:
        return not any(folder.iterdir())
    with foreign.opened(place, git.log) as inner:
        return inner.resolve("HEAD^{commit}") == recorded.split(" ")[1]


def _converted(git: Git, disk: Disk, files: dict[str, str], differ: set[str]) -> set[str]:
    """Those of `differ` that are what HEAD has, but for line ends or encoding that HEAD's own .gitattributes ask for."""
    candidates = [path for path in sorted(differ) if path in files]
    attributes = _records(git.run("ls-files", "--stage", "-z", "--", ".gitattributes", "*/.gitattributes"), 1) if candidates else []
    attributes = [(path, oid) for _, oid, path in attributes if not unsafe_path(path)]  # an index may have any path in it
    if not attributes:
        return set()
    same = set()
    with workspace.temporary() as folder:
        there = Git(folder, git_dir=git.git_dir, common_dir=git.common_dir, work_tree=folder, log=git.log)  # git looks for attributes where it stands
        for path, oid in attributes:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(git.run("cat-file", "blob", oid))
        for path in candidates:
            mode, oid = files[path].split(" ")
            found = disk.read(path)
            if found is None or found[0] != mode:
                continue
            done = there.try_run("hash-object", "--stdin", f"--path={path}", input=found[1])
            if done.returncode == 0 and done.stdout.decode().strip() == oid:
                same.add(path)
    return same
