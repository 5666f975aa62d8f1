# SPDX-License-Identifier: Apache-2.0
"""The cache of upstream trees: one bare repository per base and kind of source, complete or absent, never written again.

`sums` in it has the sha256 of every pack and pack index, made when git had just computed the ids of what is in them. Each use
reads and compares them: what does not agree counts as damaged. Trees get copies of the packs, not links to them.
"""
import errno
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from . import workspace
from .downloads import sha256
from .errors import Refused
from .git import Git
from .pins import Base

SUMS = "sums"
DOWNLOADING = ".download-"  # prefix of the folders that pip fills
BASE, VERSION = "refs/stack/base", "refs/stack/version"
SET_ELSEWHERE = "set VLLM_STACK_CACHE to a folder that you can write"


def root() -> pathlib.Path:
    """$VLLM_STACK_CACHE, or vllm-dcp-stack under the user's cache folder."""
    if own := os.environ.get("VLLM_STACK_CACHE"):
        return pathlib.Path(own).expanduser().resolve()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-dcp-stack"


def repository_of(base: Base, kind: str) -> pathlib.Path:
    """Where the import of `base` from an sdist or from git is kept."""
    # The sdist's hash is part of the name: another pin never meets an old import.
    return root() / "bases" / (f"{base.tag}-sdist-{base.sdist_sha256[:12] or 'unpinned'}.git" if kind == "sdist" else f"{base.tag}-git.git")


def downloads() -> pathlib.Path:
    """Where downloads are kept. What killed ones left there goes, also where nothing is to be downloaded."""
    folder = root() / "downloads"
    workspace.clear(folder, DOWNLOADING)
    return folder


def seal(git: Git) -> None:
    """Pack what is loose, and write down what the packs are. The repository is as readable as the user's other files then."""
    if any((git.git_dir / "objects").glob("[0-9a-f][0-9a-f]/*")):
        git.run("repack", "-d", "-q")
    lines = [f"{sha256(path)} {path.stat().st_size} {path.name}\n" for path in sorted(_packs(git.git_dir))]
    (git.git_dir / SUMS).write_text("".join(lines))
    os.chmod(git.git_dir, 0o777 & ~workspace.umask())


def _packs(git_dir: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in (git_dir / "objects" / "pack").iterdir() if path.suffix in (".pack", ".idx"))


def _read_sums(git_dir: pathlib.Path) -> dict[str, tuple[str, int]]:
    """File name -> (sha256, size). Raises ValueError where the list is damaged."""
    found = {}
    for line in (git_dir / SUMS).read_text().splitlines():
        digest, size, name = line.split(" ")
        found[name] = (digest, int(size))
    return found


def is_whole(git_dir: pathlib.Path) -> bool:
    """Whether every pack and pack index is there, and is byte for byte what was stored. Reads them all."""
    try:
        sums = _read_sums(git_dir)
        there = {path.name: path for path in _packs(git_dir)}
        return bool(sums) and there.keys() == sums.keys() and all(path.stat().st_size == sums[name][1] and sha256(path) == sums[name][0] for name, path in there.items())
    except (FileNotFoundError, ValueError):
        return False


def copy_objects(git_dir: pathlib.Path, target: pathlib.Path) -> None:
    """Give the repository `target` (a git directory) the objects of a cached one, checked on the way, and its shallow boundary."""
    sums = _read_sums(git_dir)
    folder = target / "objects" / "pack"
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(sums, key=lambda n: n.endswith(".idx")):  # git must not find an index whose pack is not there yet
        hasher = hashlib.sha256()
        with (git_dir / "objects" / "pack" / name).open("rb") as source, (folder / name).open("wb") as out:
            while block := source.read(1 << 20):
                hasher.update(block)
                out.write(block)
        if hasher.hexdigest() != sums[name][0]:
            raise Refused(f"{git_dir / 'objects' / 'pack' / name} changed while it was copied", "run the same command again: it makes the cached copy anew if that is damaged")
        os.chmod(folder / name, 0o444 & ~workspace.umask())
    if (git_dir / "shallow").exists():
        shutil.copyfile(git_dir / "shallow", target / "shallow")


def store(build: pathlib.Path, repository: pathlib.Path) -> None:
    """Move a finished import into the cache in one step. Another machine may have put a whole one there meanwhile: that stays."""
    if repository.exists() and not is_whole(repository):
        shutil.rmtree(repository)
    try:
        os.rename(build, repository)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
