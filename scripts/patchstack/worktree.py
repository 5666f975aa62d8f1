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


@dataclass(frozen=True)
class Seen:
    """`files`: path -> mode and blob at HEAD. `dirty`: tracked paths that differ from HEAD on the disk or in the index.

    `unread`: paths of HEAD that are not checked out (sparse), and all that were not read where only some were asked for.
    """

    head: str
    tree: str
    files: dict[str, str]
    dirty: tuple[str, ...]
    unread: int


def look(top: pathlib.Path, git: Git, only: Collection[str] | None = None) -> Seen | None:
    """Read the work tree `top` of `git` (from foreign.opened); None if it has no commit.

    `only`: of the files that git takes for unchanged, read no others than these; that is enough where nothing is vouched for.
    Raises Refused where the objects of HEAD are damaged.
    """
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
    disk = Disk(top)
    if only is None:
        wanted = files.keys() | index.keys()
    else:
        listed = git.run("diff-files", "--name-only", "-z", "--no-renames", "--ignore-submodules=dirty", env={"GIT_WORK_TREE": str(top)})
        wanted = {path for path in {*only, *listed.decode("utf-8", "surrogateescape").split("\0")} if path in files}
    found = disk.blobs(wanted)
    differ = {path for path, blob in found.items() if blob != files.get(path) and not (blob is None and path in absent)}
    differ -= _converted(git, disk, files, differ)
    differ -= {path for path in differ if found[path] == SUBMODULE and files.get(path, "").startswith(SUBMODULE) and _same_submodule(top / path, files[path], git)}
    unread = sum(1 for path in files if found.get(path) is None) if only is None else len(files)
    return Seen(head, tree, files, tuple(sorted(differ | staged)), unread)


def _records(out: bytes, columns: int):
    """(the first column, column number `columns`, path) of each record of ls-tree or ls-files."""
    for record in out.decode("utf-8", "surrogateescape").split("\0"):
        if record:
            meta, path = record.split("\t", 1)
            words = meta.split(" ")
            yield words[0], words[columns], path


def _index(git: Git) -> tuple[dict[str, str], set[str]]:
    """(path -> mode and blob in the index, paths that are marked as not checked out). An unmerged path has no blob."""
    index, absent = {}, set()
    for record in git.run("ls-files", "--stage", "-v", "-z").decode("utf-8", "surrogateescape").split("\0"):
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
    attributes = [path for path in files if path == ".gitattributes" or path.endswith("/.gitattributes")]
    candidates = [path for path in sorted(differ) if path in files]
    if not attributes or not candidates:
        return set()
    same = set()
    with workspace.temporary() as folder:
        there = Git(folder, git_dir=git.git_dir, common_dir=git.common_dir, work_tree=folder, log=git.log)  # git looks for attributes where it stands
        for path in attributes:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(git.run("cat-file", "blob", files[path].split(" ")[1]))
        for path in candidates:
            mode, oid = files[path].split(" ")
            found = disk.read(path)
            if found is None or found[0] != mode:
                continue
            done = there.try_run("hash-object", "--stdin", f"--path={path}", input=found[1])
            if done.returncode == 0 and done.stdout.decode().strip() == oid:
                same.add(path)
    return same
