# SPDX-License-Identifier: Apache-2.0
"""The files of a tree, to be looked up and read: of a git tree without checking it out, or as they are on the disk."""
import os
import pathlib
from collections.abc import Iterable

from .disk import Disk
from .git import Git
from .overlay import blob_id


class GitTree:
    """The files of one tree-ish. Contents are cached by blob id in `contents`, which several trees may share."""

    def __init__(self, git: Git, treeish: str, contents: dict[str, bytes] | None = None) -> None:
        self._git = git
        self._contents = {} if contents is None else contents
        out = git.run("ls-tree", "-r", "-z", treeish)
        self._ids: dict[str, str] = {}
        for record in out.decode("utf-8", "surrogateescape").split("\0"):
            if record:
                meta, path = record.split("\t", 1)
                self._ids[path] = meta.split(" ")[2]
        self._folders = {path.rsplit("/", 1)[0] for path in self._ids if "/" in path}

    def blob(self, path: str) -> str | None:
        """The blob id of `path`, None if there is no such file."""
        return self._ids.get(path)

    def paths(self) -> list[str]:
        """Every file, in git's order."""
        return list(self._ids)

    def read(self, path: str) -> bytes | None:
        oid = self._ids.get(path)
        if oid is None:
            return None
        if oid not in self._contents:
            self._contents[oid] = self._git.run("cat-file", "blob", oid)
        return self._contents[oid]

    def has_folder(self, path: str) -> bool:
        """Whether a file lies directly in the folder `path`."""
        return path in self._folders


class DiskTree:
    """The same for files below a directory. `paths`: those that count; every other file does not exist here."""

    def __init__(self, root: pathlib.Path, paths: Iterable[str]) -> None:
        self._disk = Disk(root)
        self._paths = {path: None for path in paths if self._disk.exists(path)}
        self._folders = {path.rpartition("/")[0] for path in self._paths}

    def blob(self, path: str) -> str | None:
        """The blob id of what is in `path`, None if there is no such file."""
        found = self.read(path)
        return None if found is None else blob_id(found)

    def paths(self) -> list[str]:
        return list(self._paths)

    def read(self, path: str) -> bytes | None:
        found = self._disk.read(path) if path in self._paths else None
        return found[1] if found else None

    def has_folder(self, path: str) -> bool:
        """Whether a file lies directly in the folder `path`."""
        return path in self._folders


def python_files(root: pathlib.Path) -> list[str]:
    """Every Python file below `root`/vllm, as paths below `root`."""
    found = []
    for folder, folders, names in os.walk(root / "vllm"):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        found += [str(pathlib.Path(folder, name).relative_to(root)) for name in sorted(names) if name.endswith(".py")]
    return found
