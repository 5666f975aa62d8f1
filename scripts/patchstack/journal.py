# SPDX-License-Identifier: Apache-2.0
"""Who works on a tree, and what a killed run was about to do there.

A run that changes a tree keeps one folder there (`patchstack` in its git directory), its desk. A file in it is locked while the
run, or a program that it started, lives. `journal.json` in it appears in one step before anything is changed, and disappears when
all is done: a desk whose lock is free and that has a journal was left by a killed run. A damaged journal counts as absent.

The tree may be a stranger's, who can put anything there: no link is followed, nothing is removed but what runs leave, and only
a journal of the same user is carried out.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from . import workspace
from .errors import Refused
from .patchfile import unsafe_path

SCHEMA = 1
PREPARING, RENAMING, BACK = "preparing", "renaming", "taking back"
COMMANDS = ("apply", "unapply", "export")
OLD = "old"  # copies of what was there, by their number
_FILE = "journal.json"
_OTHERS = (f"{_FILE}.new", "index", "index.lock", "index.token", "object")  # what runs leave beside these two
_TEMPORARY = re.compile(r"\.[^/]{0,40}\.patchstack-[0-9a-f]{12}", re.DOTALL)


@dataclass(frozen=True)
class Change:
    """One file. `before`, `after`: `<mode> <blob id>`, None where there is no file. `temporary`: the name beside it that the new content has first.

    `owner`, `bits`: user, group and permissions that the file keeps, or gets.
    """

    path: str
    before: str | None
    after: str | None
    temporary: str
    owner: tuple[int, int]
    bits: int


@dataclass(frozen=True)
class Journal:
    """`command`: what was run, for the reader. `made`: folders that come with the change. `emptied`: folders that it may leave empty.

    `git`: what becomes of HEAD, branches and index, for whoever understands it (gitstate.py). `phase`: before RENAMING the change is taken back.
    """

    command: str
    root: str
    phase: str
    changes: tuple[Change, ...]
    made: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    git: dict = field(default_factory=dict)

    def dump(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **vars(self), "changes": [vars(change) for change in self.changes]}).encode()  # lone surrogates of odd names become \\udcXX


def parse(data: bytes) -> Journal | None:
    """None for a damaged journal, and for one that no run writes: it could name files outside the tree."""
    try:
        fields = json.loads(data)
        if fields.pop("schema") != SCHEMA or fields["phase"] not in (PREPARING, RENAMING, BACK):
            return None
        changes = tuple(Change(**{**c, "owner": (int(c["owner"][0]), int(c["owner"][1]))}) for c in fields.pop("changes"))
        found = Journal(**{**fields, "changes": changes, "made": tuple(fields["made"]), "emptied": tuple(fields["emptied"])})
        paths = (*(c.path for c in changes), *found.made, *found.emptied)
        if found.command not in COMMANDS or any(map(unsafe_path, paths)) or not all(_TEMPORARY.fullmatch(c.temporary) for c in changes):
            return None
        return found
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


@dataclass(frozen=True)
class Desk:
    """The folder of a run, held. `found`: the journal that a killed run left in it."""

    folder: pathlib.Path
    found: Journal | None

    def write(self, journal: Journal) -> None:
        """Put `journal` in force, in one step."""
        new = self.folder / f"{_FILE}.new"
        workspace.write_through(new, journal.dump())
        os.replace(new, self.folder / _FILE)
        workspace.sync(self.folder)

    def forget(self) -> None:
        """All is done, or taken back."""
        (self.folder / _FILE).unlink(missing_ok=True)
        workspace.sync(self.folder)


def left_in(home: pathlib.Path, name: str, waiting: Callable[[str], None]) -> Journal | None:
    """What a killed run left, changing nothing; waits for a run that is at work. None where nothing is to be finished."""
    while True:
        try:
            fd = os.open(home / name / workspace.LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not workspace.try_lock(fd, shared=True):
                waiting(f"another run works in {home}; waiting for it")
                workspace.try_lock(fd, shared=True, wait=True)
            if workspace.same_file(fd, home / name / workspace.LOCK):
                return _read(home / name)
        finally:
            os.close(fd)


def _read(folder: pathlib.Path) -> Journal | None:
    try:
        return parse((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def desk(home: pathlib.Path, name: str, waiting: Callable[[str], None]) -> Iterator[Desk]:
    """Hold the folder `name` in `home`; waits for another run. At the end it goes, unless a journal in it says that something is half-done."""
    folder, fd = home / name, None
    while fd is None:
        fd = _take(folder, waiting)
    workspace.held_fds.add(fd)
    try:
        found = _read(folder)
        if found is not None:
            _refuse_others(folder, found)
        elif os.path.lexists(folder / _FILE):
            _set_aside(folder, waiting)
        _clear(folder, keep=found is not None)
        yield Desk(folder, found)
    finally:
        if not os.path.lexists(folder / _FILE):
            _clear(folder, keep=False)
            (folder / workspace.LOCK).unlink()  # last: whoever waits for it looks whether it is still there
            with contextlib.suppress(OSError):  # the next run may have its lock there already, or somebody put other things there
                folder.rmdir()
        workspace.held_fds.discard(fd)
        os.close(fd)


def _clear(folder: pathlib.Path, *, keep: bool) -> None:
    """Remove what runs leave at a desk, and nothing else. `keep`: not the copies of what was there."""
    for entry in (folder / name for name in (*_OTHERS, *(() if keep else (OLD,)))):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif os.path.lexists(entry):
            entry.unlink()


def _refuse_others(folder: pathlib.Path, found: Journal) -> None:
    """Refuse to carry out the journal of another user: it says what becomes whose file, and root could do whatever it says."""
    new = folder / f"{_FILE}.new"
    workspace.write(new, b"")  # whose our files are here: not always ours, on a network file system
    maker, mine = (folder / _FILE).lstat().st_uid, new.lstat().st_uid
    new.unlink()
    if maker != mine:
        raise Refused(f"`{found.command}` was interrupted in {folder.parent}, and user {maker} had run it: nobody else finishes it or takes it back", "run the same command as that user; then it can be run by others again")


def _take(folder: pathlib.Path, waiting: Callable[[str], None]) -> int | None:
    """Lock the desk, made if it is not there, waiting for its run; None if it went meanwhile."""
    lock = folder / workspace.LOCK
    if folder.is_symlink():
        raise Refused(f"{folder} is a link: runs keep their notes in a folder there", "remove it, then run the same command again; nothing was changed")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            try:
                workspace.give_to_owner_of(folder.parent, folder)
            except Refused:
                folder.rmdir()
                raise
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        workspace.give_to_owner_of(folder.parent, lock)
    except FileNotFoundError:
        return None
    except PermissionError:
        if not folder.is_dir():
            raise
        raise Refused(f"{folder} was left by a run of user {folder.stat().st_uid}, and you may not write there", "run the same command again as that user") from None
    if not workspace.try_lock(fd):
        waiting(f"another run works in {folder.parent}; waiting for it")
        workspace.try_lock(fd, wait=True)
    if workspace.same_file(fd, lock):
        return fd
    os.close(fd)
    return None


def tidy(home: pathlib.Path, name: str, waiting: Callable[[str], None]) -> None:
    """Remove what a run left that was killed before it changed anything, for a run that has nothing to do here."""
    if (home / name).is_dir() and left_in(home, name, waiting) is None:
        with desk(home, name, waiting):
            pass


def _set_aside(folder: pathlib.Path, waiting: Callable[[str], None]) -> None:
    """Keep what lies beside a damaged journal: it may be the only copy of a file."""
    aside = workspace.new_folder(folder.parent, f"{folder.name}.damaged-")
    workspace.give_to_owner_of(folder.parent, aside)
    for entry in sorted(folder.iterdir()):
        if entry.name != workspace.LOCK:
            os.rename(entry, aside / entry.name)
    waiting(f"{folder / _FILE} is damaged and counts as absent; what was beside it is kept in {aside}")
