# SPDX-License-Identifier: Apache-2.0
"""Scratch folders. While a run lives it holds a lock in each of them; what a killed run left is removed by the next one.

The lock is on a file inside the folder (flock): it does not rest on process ids, which mean nothing in another container,
and it works on network file systems. Programs that a run starts inherit it, so a folder also lives as long as they do.
"""
import atexit
import contextlib
import fcntl
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import IO

from .errors import Refused

LOCK = ".lock"
_AT_ONCE = 8
_NOLOCKS = "this file system cannot lock files"

held_fds: set[int] = set()  # what programs that we start inherit
_own: contextlib.ExitStack | None = None
_root: pathlib.Path | None = None


def try_lock(fd: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; False if somebody else holds it. Raises Refused where locks are not possible."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        return True
    except BlockingIOError:
        return False
    except OSError as e:
        raise Refused(f"{os.readlink(f'/proc/self/fd/{fd}') if os.path.isdir('/proc/self/fd') else 'a file'}: {_NOLOCKS} ({e.strerror})",
                      "use a folder on another file system (--dest, VLLM_STACK_CACHE, TMPDIR)") from None  # fmt: skip


def same_file(fd: int, path: pathlib.Path) -> bool:
    """Whether `path` is still the file that `fd` was opened from."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def new_folder(parent: pathlib.Path, prefix: str) -> pathlib.Path:
    """A new folder of a name that nobody can guess, for its owner alone."""
    folder = parent / f"{prefix}{os.urandom(8).hex()}"
    folder.mkdir(mode=0o700)
    return folder


def make(parent: pathlib.Path, prefix: str) -> tuple[pathlib.Path, int]:
    """A new locked folder, and the open lock. A run that clears old folders may take a new one for old before it is locked: then try again."""
    while True:
        folder = new_folder(parent, prefix)
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        if try_lock(fd) and same_file(fd, folder / LOCK):
            held_fds.add(fd)
            return folder, fd
        os.close(fd)


def clear(parent: pathlib.Path, prefix: str) -> None:
    """Remove the folders of runs that have ended. Those of other users, and what is no folder, stay."""
    try:
        names = [e.name for e in os.scandir(parent) if e.name.startswith(prefix) and e.is_dir(follow_symlinks=False) and e.stat(follow_symlinks=False).st_uid == os.geteuid()]
    except OSError:  # the folder is gone, or may not be read: then there is nothing of ours to remove
        return
    for name in names:
        folder = parent / name
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:  # read-only, or removed by another run
            continue
        try:
            if try_lock(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file of our own; not through a link that somebody put there."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb") as f:
        f.write(data)


def sync(path: str | pathlib.Path, folder: int | None = None) -> None:
    """Bring a file, or the names in a folder, down to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_all(files: list[tuple[str | pathlib.Path, int | None]]) -> None:
    """The same for many files (path, open folder) side by side: the file system then writes its own journal once for several."""
    todo, failed = files[::-1], []

    def work() -> None:
        while todo and not failed:
            with contextlib.suppress(IndexError):  # another one took the last
                file = todo.pop()
                try:
                    sync(*file)
                except OSError as e:
                    failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(min(_AT_ONCE, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def write_through(path: pathlib.Path, data: bytes) -> None:
    """Write a file of our own, down to the disk."""
    write(path, data)
    sync(path)


def give_to_owner_of(folder: pathlib.Path, *paths: pathlib.Path) -> None:
    """Under sudo, what is made in somebody's folder becomes theirs."""
    if os.geteuid() == 0:
        owner = os.stat(folder)
        for path in paths:
            try:
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
            except OSError as e:  # a user whom this container does not know
                raise Refused(f"{folder} belongs to user {owner.st_uid}, and what is made in it cannot be given to them: {e.strerror}", "run the command as that user") from None


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def scratch(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """A new folder below `parent`, removed at the end; also removes what killed runs left under that prefix."""
    clear(parent, prefix)
    folder, fd = make(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        held_fds.discard(fd)
        os.close(fd)


def temporary_root() -> pathlib.Path:
    """TMPDIR, or where temporary files are else. Python's own way of finding it leaves a file there if it is killed meanwhile."""
    places = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")] + ["/tmp", "/var/tmp", "/dev/shm"]
    for place in places:
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return pathlib.Path(place).absolute()
    raise Refused("there is no folder for temporary files", "set TMPDIR to one that you can write")


def temporary_file() -> IO[bytes]:
    """An open file without a name."""
    with temporary() as folder:
        return (folder / "file").open("w+b")


@contextlib.contextmanager
def temporary() -> Iterator[pathlib.Path]:
    """A new folder in the one place below TMPDIR that this run has."""
    folder = until_the_end()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until_the_end() -> pathlib.Path:
    """The same, which stays until the run ends."""
    global _own, _root
    if _root is None:
        stack = contextlib.ExitStack()
        _root = stack.enter_context(scratch(temporary_root(), "patchstack-"))
        _own = stack
        atexit.register(leave)
    return new_folder(_root, "")


def leave() -> None:
    """Remove this run's place below TMPDIR."""
    global _own, _root
    if _own is not None:
        _own.close()
    _own = _root = None
