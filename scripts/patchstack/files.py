# SPDX-License-Identifier: Apache-2.0
"""File-system steps that either happen whole or not at all: linked copies, directory exchange, locks."""
import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

from .errors import Refused

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def link_or_copy(source: str, target: str) -> None:
    """Hard link `source` as `target`, or copy it where links are not possible. Git replaces files, it never writes into them."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def linked_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a working tree with its .git: work files and git objects linked, everything else in .git copied."""
    git = str(source / ".git")
    objects = git + "/objects"

    def copy(src: str, dst: str) -> None:
        if src.startswith(git + "/") and not src.startswith(objects + "/"):
            shutil.copy2(src, dst, follow_symlinks=False)  # refs, index, logs: git may write into some of them
        else:
            link_or_copy(src, dst)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def link_objects(source: pathlib.Path, target: pathlib.Path) -> None:
    """Give the repository `target` (a git directory) the objects of `source`, and its shallow boundary. `target` may have others already."""

    def link(src: str, dst: str) -> None:
        if not os.path.exists(dst):  # a file of objects/ is named by what is in it
            link_or_copy(src, dst)

    info = str(source / "objects")  # objects/info describes one repository's packs, not those of two
    shutil.copytree(source / "objects", target / "objects", copy_function=link, dirs_exist_ok=True, ignore=lambda folder, names: {"info"} if folder == info else set())
    if (source / "shallow").exists():
        shutil.copy2(source / "shallow", target / "shallow")


def exchange(a: pathlib.Path, b: pathlib.Path) -> None:
    """Swap two directories in one step (Linux renameat2). Raises Refused where that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise Refused("this system cannot swap two directories in one step (no renameat2)", "apply to a new --dest instead")
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.EBUSY, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
            raise Refused(f"{b} cannot be swapped in one step ({os.strerror(code)}): is it a mount point?", "use a --dest one level below")
        raise OSError(code, os.strerror(code), str(b))


def check_writable(folder: pathlib.Path) -> None:
    """Raise Refused unless a file can be made in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise Refused(f"cannot write in {folder}: {e.strerror}", "choose another --dest, or mend its permissions; nothing was changed") from None


@contextlib.contextmanager
def locked(folder: pathlib.Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold an advisory lock on a directory, so that two runs do not work on the same place. Leaves no file behind."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another run works in {folder}; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _scratch_prefix(target: pathlib.Path) -> str:
    return f".{target.name}.patchstack-"


def _scratches(target: pathlib.Path) -> list[pathlib.Path]:
    return list(target.parent.glob(f"{glob.escape(_scratch_prefix(target))}*"))


def clear_scratch(target: pathlib.Path, waiting: Callable[[str], None]) -> None:
    """Remove what a killed run left beside `target`, for a run that has nothing else to do there."""
    if _scratches(target):
        with locked(target.parent, waiting):
            for stale in _scratches(target):
                shutil.rmtree(stale, ignore_errors=True)


@contextlib.contextmanager
def scratch_beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new directory on the file system of `target`, removed at the end; also removes what a killed run left. Hold the lock of the parent."""
    for stale in _scratches(target):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=_scratch_prefix(target), dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
