# SPDX-License-Identifier: Apache-2.0
"""Files of a directory as they are on the disk now: every byte is read, no link is followed, no record of git is believed."""
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterable

from .overlay import blob_id

FILE, EXECUTABLE, LINK, SUBMODULE = "100644", "100755", "120000", "160000"


class Disk:
    """Files below `root`. A path that leads through a symbolic link counts as absent, as it does for git."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = os.fsencode(root)
        self._folders: dict[bytes, bool] = {b"": True}

    def _is_folder(self, folder: bytes) -> bool:
        """Whether `folder` is reached through real directories only."""
        known = self._folders.get(folder)
        if known is None:
            try:
                known = self._is_folder(folder.rpartition(b"/")[0]) and stat.S_ISDIR(os.lstat(os.path.join(self.root, folder)).st_mode)
            except OSError:
                known = False
            self._folders[folder] = known
        return known

    def read(self, path: str) -> tuple[str, bytes] | None:
        """(git's mode, content) of a regular file or a link; a directory has the mode of a submodule. None if there is nothing, or something else."""
        name = os.fsencode(path)
        if not self._is_folder(name.rpartition(b"/")[0]):
            return None
        full = os.path.join(self.root, name)
        try:
            found = os.lstat(full)
            if stat.S_ISLNK(found.st_mode):
                return LINK, os.readlink(full)
            if stat.S_ISDIR(found.st_mode):
                return SUBMODULE, b""
            if not stat.S_ISREG(found.st_mode):
                return None
            fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(fd, "rb", buffering=0) as f:
            return (EXECUTABLE if found.st_mode & stat.S_IXUSR else FILE), f.readall()

    def exists(self, path: str) -> bool:
        """Whether anything stands there, also behind a link."""
        return os.path.lexists(os.path.join(self.root, os.fsencode(path)))

    def blob(self, path: str) -> str | None:
        """`<mode> <blob id>` of a file or link, `160000` of a directory, None if there is no such thing."""
        found = self.read(path)
        if found is None:
            return None
        return SUBMODULE if found[0] == SUBMODULE else f"{found[0]} {blob_id(found[1])}"

    def blobs(self, paths: Iterable[str]) -> dict[str, str | None]:
        """`blob` of each path."""
        return {path: self.blob(path) for path in paths}


def tree_id(files: dict[str, str]) -> str:
    """git's id of the tree that holds exactly `files` (`path -> "<mode> <blob id>"`)."""
    root: dict = {}
    for path, blob in files.items():
        folder = root
        *parents, name = os.fsencode(path).split(b"/")
        for parent in parents:
            folder = folder.setdefault(parent, {})
        folder[name] = blob
    return _tree(root)


def _tree(folder: dict) -> str:
    entries = []
    for name, value in folder.items():
        if isinstance(value, dict):
            entries.append((name + b"/", b"40000 " + name + b"\0" + bytes.fromhex(_tree(value))))
        else:
            mode, oid = value.split(" ")
            entries.append((name, mode.encode() + b" " + name + b"\0" + bytes.fromhex(oid)))
    data = b"".join(entry for _, entry in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
