# SPDX-License-Identifier: Apache-2.0
"""Read files of a git tree without checking it out."""
from .git import Git


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
