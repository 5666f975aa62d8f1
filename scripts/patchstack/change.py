# SPDX-License-Identifier: Apache-2.0
"""Change a few files of a directory that is not ours: each is written beside its target and renamed, behind a journal.

1. Look: every target is what it should be, and lies below the root without a link in between.
2. Keep a copy of what is there, then put the journal in force (journal.py).
3. Write every new file beside its target, with the owner and permissions of the one it replaces, down to the disk. The journal says so.
4. Rename one after the other, looking again right before each. Then whatever belongs to it (index, HEAD), then the journal goes.

What fails before the end is taken back. What is killed is finished or taken back by the next run: `recover`. No other path is
touched; a folder is made or removed only where the change makes it appear or leaves it empty.
"""
import contextlib
import errno
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import workspace
from .disk import EXECUTABLE, FILE
from .errors import Refused, StackError
from .journal import BACK, OLD, PREPARING, RENAMING, Change, Desk, Journal
from .overlay import blob_id

_ACCESS_LIST = "system.posix_acl_access"


@dataclass(frozen=True)
class Edit:
    """One file: what is there (`<mode> <blob id>`, None: nothing) and what is to be there (git's mode and content, None: nothing)."""

    path: str
    before: str | None
    after: tuple[str, bytes] | None


class Finish:
    """What belongs to a change of files beside the files: nothing, or git's HEAD and index (gitstate.py)."""

    def forward(self, recovering: bool) -> None:
        """Make it so. Done twice it changes nothing more."""

    def back(self) -> None:
        """Undo that, from any state in between."""


def run(desk: Desk, root: pathlib.Path, command: str, edits: list[Edit], finish: Finish, *, emptied: tuple[str, ...] = (), git: dict | None = None) -> None:
    """Make the edits below `root`, or none of them. Raises Refused with the file that is in the way; then nothing was changed."""
    with _Root(root) as tree:
        changes, data = [], {}
        old = desk.folder / OLD
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(0o700)
        for number, edit in enumerate(edits):
            change = _plan(tree, edit)
            if change.before is not None:
                workspace.write(old / str(number), tree.read(change.path)[1])
            changes.append(change)
            data[edit.path] = edit.after[1] if edit.after else None
        record = Journal(command, str(root), PREPARING, tuple(changes), tuple(tree.missing_folders([c.path for c in changes if c.after])), emptied, git or {})
        desk.write(record)
        try:
            for folder in record.made:
                tree.make_folder(folder)
            for change in record.changes:
                if change.after is not None:
                    tree.write_beside(change, data[change.path])
            copies = [(old / str(number), None) for number, change in enumerate(record.changes) if change.before is not None]
            workspace.sync_all([*copies, *(tree.place_beside(change) for change in record.changes if change.after is not None)])
            record = replace(record, phase=RENAMING)
            desk.write(record)
            _forward(tree, record, finish, recovering=False)
        except BaseException as e:
            _undo(desk, tree, record, finish, e)
            raise
        desk.forget()


def _undo(desk: Desk, tree: "_Root", record: Journal, finish: Finish, why: BaseException) -> None:
    """Take back what a failing run did. If that fails too, the journal stays."""
    try:
        take_back(desk, tree, record, finish)
    except (OSError, StackError) as e:
        said = e.message if isinstance(e, StackError) else f"{e.filename or ''}: {e.strerror}"
        first = why.message if isinstance(why, StackError) else str(why)
        raise Refused(f"{first}\nand what was done could not be taken back: {said}", f"mend that, then run `{record.command}` again: it finishes or takes back what is half-done") from why


def _plan(tree: "_Root", edit: Edit) -> Change:
    """The change that an edit is, after a look at what is there."""
    there = tree.blob(edit.path)
    if there != edit.before:
        raise Refused(f"{tree.name(edit.path)} is {_named(there)}, expected was {_named(edit.before)}: something else changed it just now", "look what writes there, then run the same command again; nothing was changed")
    owner, bits = tree.keeps(edit.path, edit.after[0] if edit.after else None)
    after = f"{edit.after[0]} {blob_id(edit.after[1])}" if edit.after else None
    return Change(edit.path, edit.before, after, f".{edit.path.rpartition('/')[2][:40]}.patchstack-{os.urandom(6).hex()}", owner, bits)


def _named(blob: str | None) -> str:
    return "absent" if blob is None else re.sub(r"^(\d{6}) ([0-9a-f]{10}).*", r"\2 (\1)", blob)


def _forward(tree: "_Root", record: Journal, finish: Finish, *, recovering: bool) -> None:
    """Rename what is not renamed yet, then what belongs to it."""
    for change in record.changes:
        there = tree.blob(change.path)
        if there == change.after:
            tree.remove_beside(change)  # a killed run may have left both names
        elif there != change.before:
            raise Refused(f"{tree.name(change.path)} is {_named(there)} now, it was {_named(change.before)}: something else changed it meanwhile", "look what writes there, then run the same command again; everything was taken back")
        elif change.after is None:
            tree.remove(change.path)
        else:
            tree.rename_beside(change)
    finish.forward(recovering)
    for folder in sorted(record.emptied, key=len, reverse=True):
        tree.remove_folder(folder)


def take_back(desk: Desk, tree: "_Root", record: Journal, finish: Finish) -> None:
    """Put back every file that was changed. What somebody else wrote meanwhile stays.

    Raises Refused, before anything is done, if that is a file that had been changed already: it cannot be told what is to become of it.
    """
    changes, strange = [], []
    for change in record.changes:
        there = tree.blob(change.path)
        if there in (change.before, change.after, None):
            changes.append(change)
        elif record.phase != BACK and (change.after is None or tree.beside(change) == change.after or record.phase == PREPARING):
            changes.append(replace(change, before=there, after=there))  # not ours yet: it stays as it is
        else:
            strange.append(change.path)
    if strange:
        raise Refused(f"{tree.root}: edited since `{record.command}` was interrupted: {', '.join(strange)}",
                      f"move {'it' if len(strange) == 1 else 'them'} away (and keep what you need), then run the same command again: it puts back what was there")  # fmt: skip
    left = [change for change in changes if change not in record.changes]
    for change in changes:
        if change not in left:
            tree.remove_beside(change)  # first: it makes room. Without them this cannot be finished any more, only taken back
    if left:  # what lies beside these tells that they are not ours: it goes when the journal says so
        desk.write(replace(record, phase=BACK, changes=tuple(changes)))
    finish.back()
    for change in left:
        tree.remove_beside(change)
    for number, change in enumerate(changes):
        if tree.blob(change.path) == change.before:
            continue
        if change.before is None:
            tree.remove(change.path)
            continue
        for folder in tree.missing_folders([change.path]):
            tree.make_folder(folder)
        mode, oid = change.before.split(" ")
        data = (desk.folder / OLD / str(number)).read_bytes()
        if blob_id(data) != oid:
            raise Refused(f"{desk.folder / OLD / str(number)}, the copy of {tree.name(change.path)}, was changed: it is no longer {oid[:10]}", f"put {tree.name(change.path)} back from git, then run the same command again")
        tree.write_beside(replace(change, bits=_bits(change.bits, mode)), data)
        workspace.sync(*tree.place_beside(change))
        tree.rename_beside(change, over=True)
    for folder in sorted(record.made, key=len, reverse=True):
        tree.remove_folder(folder)
    desk.forget()


def recover(desk: Desk, root: pathlib.Path, finish: Finish) -> str | None:
    """Finish or take back what a killed run left at this desk; return what was done, None if there was nothing."""
    record = desk.found
    if record is None:
        return None
    with _Root(root) as tree:
        if record.phase == RENAMING and all(_can_go_on(tree, c) for c in record.changes):
            try:
                _forward(tree, record, finish, recovering=True)
            except BaseException as e:
                _undo(desk, tree, record, finish, e)
                raise
            desk.forget()
            return f"finished `{record.command}`, which had been interrupted"
        take_back(desk, tree, record, finish)
        return f"took back `{record.command}`, which had been interrupted"


def _can_go_on(tree: "_Root", change: Change) -> bool:
    """Whether the change is made already, or can be: its new content lies whole beside the untouched target."""
    there = tree.blob(change.path)
    if there == change.after:
        return True
    if there != change.before:
        return False
    return change.after is None or tree.beside(change) == change.after


def _bits(bits: int, mode: str) -> int:
    """Permissions for a file of git's mode: executable by whoever may read it, or by nobody."""
    return bits | (bits & 0o444) >> 2 if mode == EXECUTABLE else bits & ~0o111


def _attributes(fd: int) -> list[str]:
    if not hasattr(os, "listxattr"):  # another system than Linux
        return []
    try:
        return os.listxattr(fd)
    except OSError as e:
        if e.errno != errno.ENOTSUP:
            raise
        return []


class _Root:
    """A directory whose files are reached by real folders only: no path of ours leads through a link that somebody put there."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def __enter__(self) -> "_Root":
        self._open = {"": os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)}
        return self

    def __exit__(self, *_) -> None:
        for fd in self._open.values():
            os.close(fd)

    def name(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _folder(self, folder: str) -> int:
        """A folder below the root, which stays open. Raises FileNotFoundError, or Refused where a link or a file stands in the way."""
        if folder not in self._open:
            above, _, name = folder.rpartition("/")
            try:
                self._open[folder] = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder(above))
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise Refused(f"{self.name(folder)} is a link or a file, not a folder", "move it away, then run the same command again; nothing was changed") from None
                raise type(e)(e.errno, e.strerror, self.name(folder)) from None
        return self._open[folder]

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        folder, _, name = path.rpartition("/")
        fd = self._folder(folder)
        try:
            yield fd, name
        except OSError as e:
            if e.errno in (errno.EBUSY, errno.EXDEV):
                raise Refused(f"{self.name(path)} is a mount point ({os.strerror(e.errno)}): it can be neither replaced nor removed", "unmount it, then run the same command again; everything was taken back") from None
            raise type(e)(e.errno, e.strerror, self.name(path)) from None

    def _read(self, folder: int, name: str) -> tuple[os.stat_result, bytes] | None:
        """(status, content) of a regular file; (status, b"") of anything else."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return found, b""
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        with open(fd, "rb", buffering=0) as f:
            return os.fstat(fd), f.readall()

    def read(self, path: str) -> tuple[os.stat_result, bytes] | None:
        try:
            with self._parent(path) as (folder, name):
                return self._read(folder, name)
        except FileNotFoundError:
            return None

    def blob(self, path: str) -> str | None:
        """`<mode> <blob id>`; None if nothing is there; another word for what is no regular file."""
        return _blob(self.read(path))

    def beside(self, change: Change) -> str | None:
        """The same of the new file beside the target."""
        return self.blob(_sibling(change))

    def keeps(self, path: str, mode: str | None) -> tuple[tuple[int, int], int]:
        """(owner, permissions) for the new file at `path`: those of the file that is there, else of a new one in that folder."""
        found = self.read(path)
        if found:
            there = found[0]
            bits = stat.S_IMODE(there.st_mode)
            return (there.st_uid, there.st_gid), bits if mode in (None, EXECUTABLE if bits & stat.S_IXUSR else FILE) else _bits(bits, mode)
        own = 0o700 if mode == EXECUTABLE else 0o600
        return self._owner_of_new(path), own | (0o777 if mode == EXECUTABLE else 0o666) & ~workspace.umask()

    def _owner_of_new(self, path: str) -> tuple[int, int]:
        """Under sudo, what is new in a folder belongs to its owner. Otherwise as it comes: (-1, -1)."""
        if os.geteuid() != 0:
            return -1, -1
        folder = path.rpartition("/")[0]
        while True:
            try:
                there = os.fstat(self._folder(folder))
                return there.st_uid, there.st_gid
            except FileNotFoundError:
                folder = folder.rpartition("/")[0]

    def missing_folders(self, paths: list[str]) -> list[str]:
        """The folders that `paths` need and that are not there, outer ones first."""
        missing: dict[str, None] = {}
        for path in paths:
            parts = path.split("/")[:-1]
            for count in range(1, len(parts) + 1):
                folder = "/".join(parts[:count])
                try:
                    self._folder(folder)
                except FileNotFoundError:
                    missing[folder] = None
        return list(missing)

    def make_folder(self, folder: str) -> None:
        owner = self._owner_of_new(folder)
        with self._parent(folder) as (fd, name), contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)
            if owner != (-1, -1):
                os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder that is empty; one that holds something, or that something is mounted on, stays."""
        try:
            with self._parent(folder) as (fd, name):
                os.rmdir(name, dir_fd=fd)
            if folder in self._open:
                os.close(self._open.pop(folder))
        except (FileNotFoundError, Refused):
            pass
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def write_beside(self, change: Change, data: bytes) -> None:
        """Write the new content beside the target, with its owner, permissions and access list."""
        with self._parent(change.path) as (folder, name):
            fd = os.open(change.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            with open(fd, "wb") as f:
                f.write(data)
                f.flush()
                there = os.fstat(fd)
                if change.owner not in ((-1, -1), (there.st_uid, there.st_gid)):
                    try:
                        os.fchown(fd, *change.owner)
                    except OSError as e:
                        uid, gid = change.owner
                        raise Refused(f"{self.name(change.path)} belongs to user {uid}, group {gid}, and you may not make files of theirs ({e.strerror})",
                                      "run the command as that user, or as root; everything was taken back") from None  # fmt: skip
                os.fchmod(fd, change.bits)
                with contextlib.suppress(FileNotFoundError):
                    self._take_over(folder, name, fd)

    def place_beside(self, change: Change) -> tuple[str, int]:
        """The name of the new file beside the target, and its open folder."""
        return change.temporary, self._folder(change.path.rpartition("/")[0])

    def _take_over(self, folder: int, name: str, new: int) -> None:
        """Give a new file what the old one has beside owner and permissions: its access list, and another time than the old one's."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            lists = [os.getxattr(f, _ACCESS_LIST) if _ACCESS_LIST in _attributes(f) else None for f in (fd, new)]
            if lists[0] != lists[1]:
                os.removexattr(new, _ACCESS_LIST) if lists[0] is None else os.setxattr(new, _ACCESS_LIST, lists[0])
            was, now = os.fstat(fd), os.fstat(new)
            if was.st_size == now.st_size and int(was.st_mtime) == int(now.st_mtime):
                os.utime(new, ns=(now.st_atime_ns, now.st_mtime_ns + 10**9))  # compiled Python files know their source by size and second
        finally:
            os.close(fd)

    def rename_beside(self, change: Change, *, over: bool = False) -> None:
        """Put the file beside the target in its place. Where nothing is to be replaced, nothing is, unless `over`."""
        with self._parent(change.path) as (folder, name):
            if change.before is None and not over:
                try:
                    os.link(change.temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                    os.unlink(change.temporary, dir_fd=folder)
                    return
                except FileExistsError:
                    raise Refused(f"{self.name(change.path)} appeared just now", "look what writes there, then run the same command again; everything was taken back") from None
                except OSError as e:
                    if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):  # no hard links there
                        raise
            os.rename(change.temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove_beside(self, change: Change) -> None:
        self.remove(_sibling(change))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._parent(path) as (folder, name):
            os.stat(name, dir_fd=folder, follow_symlinks=False)  # a read-only file system does not say that there is nothing
            os.unlink(name, dir_fd=folder)


def _sibling(change: Change) -> str:
    folder = change.path.rpartition("/")[0]
    return f"{folder}/{change.temporary}" if folder else change.temporary


def _blob(found: tuple[os.stat_result, bytes] | None) -> str | None:
    if found is None:
        return None
    if not stat.S_ISREG(found[0].st_mode):
        return "no regular file"
    return f"{EXECUTABLE if found[0].st_mode & stat.S_IXUSR else FILE} {blob_id(found[1])}"
