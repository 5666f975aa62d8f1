# SPDX-License-Identifier: Apache-2.0
"""File-system steps that either happen whole or not at all: directory exchange, locks."""
import contextlib
import errno
import os
import pathlib
import re
from collections.abc import Callable, Iterator

from .errors import Refused
from .workspace import try_lock

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(a: pathlib.Path, b: pathlib.Path) -> None:
    """Swap two directories in one step (Linux renameat2). Raises Refused where that is not possible."""
    import ctypes  # takes longer to load than most commands that do not come here have to spare

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise Refused("this system cannot swap two directories in one step (no renameat2)", "choose another place, or remove the old one first")
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.EBUSY, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
            raise Refused(f"{b} cannot be swapped in one step ({os.strerror(code)}): is it a mount point?", "choose another place, or remove it first")
        raise OSError(code, os.strerror(code), str(b))


def refuse_mounts(folder: pathlib.Path) -> None:
    """Refuse to move or remove a folder of ours in which something is mounted: that would go with it."""
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # another system than Linux
        return
    here = os.path.realpath(os.fsencode(folder))
    points = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4]) for line in lines)
    if inside := [os.fsdecode(point) for point in points if point == here or point.startswith(here + b"/")]:
        raise Refused(f"something is mounted in {folder}: {', '.join(inside)}", "unmount it, or choose another place; nothing was changed")


def is_fresh(target: pathlib.Path) -> bool:
    """Whether `target` is absent or an empty directory."""
    return not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))


def check_writable(folder: pathlib.Path, advice: str = "choose another --dest, or mend its permissions") -> None:
    """Raise Refused unless a file can be made in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
        probe = folder / f".patchstack-{os.urandom(6).hex()}"
        probe.touch()  # fails, and says why
        probe.unlink()
    except OSError as e:
        raise Refused(f"cannot write in {folder}: {e.strerror}", f"{advice}; nothing was changed") from None


@contextlib.contextmanager
def locked(folder: pathlib.Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold an advisory lock on a directory, so that two runs on this machine do not do the same work. Leaves no file behind."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(fd):
            waiting(f"another run works in {folder}; waiting for it")
            try_lock(fd, wait=True)
        yield
    finally:
        os.close(fd)
