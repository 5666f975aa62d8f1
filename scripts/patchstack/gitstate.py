# SPDX-License-Identifier: Apache-2.0
"""What `apply` and `unapply` change in a repository beside the files: the index of the stack's paths, branches, records, HEAD.

State lives in git: refs/patchstack/base and refs/patchstack/applied, `patchstack.tag` and `patchstack.before` in the configuration.
Every step can be done again, in both directions, so that a killed run can be finished or taken back. HEAD moves last.
"""
import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from . import foreign, workspace
from .change import Finish
from .errors import Refused
from .git import Git

BASE_REF = "refs/patchstack/base"
APPLIED_REF = "refs/patchstack/applied"
BRANCH = "dcp-stack"
UPSTREAM_BRANCH = "upstream"
BRANCH_REF = f"refs/heads/{BRANCH}"
TAG_KEY, BEFORE_KEY = "patchstack.tag", "patchstack.before"
# What git writes in a git directory here: each has a lock file beside it while it does.
_WRITTEN = ("index", "HEAD", "config", "packed-refs", BRANCH_REF, BASE_REF, APPLIED_REF)
_LOGS = ("logs/HEAD", f"logs/{BRANCH_REF}")
_MADE = ("refs/patchstack", "logs", "logs/refs", "logs/refs/heads", "logs/refs/patchstack")  # folders that git makes where they are missing
_FOLDERS = ("refs", "refs/heads", "objects", "objects/pack", "objects/info")
_STALE_AFTER = 2.0  # seconds: git holds none of these longer, but for the index, whose lock of ours is known by its content
_OUR_LOCK = b"held by vllm-dcp-stack\n"


@dataclass(frozen=True)
class Move:
    """(before, after) of everything. `index`: path -> `<mode> <blob id>`; `refs`: name -> commit; `head`: `ref: <name>` or a commit;
    `settings`: key -> value. None: not there. `owners`: of the files in the git directory that git replaces."""

    command: str
    index: dict[str, tuple[str | None, str | None]]
    refs: dict[str, tuple[str | None, str | None]]
    head: tuple[str, str]
    settings: dict[str, tuple[str | None, str | None]]
    owners: dict[str, tuple[int, int]]

    def record(self) -> dict:
        return asdict(self)


def head_of(git: Git) -> str:
    """`ref: <name>`, or the commit of a detached HEAD."""
    done = git.try_run("symbolic-ref", "--quiet", "HEAD")
    return f"ref: {done.stdout.decode('utf-8', 'surrogateescape').strip()}" if done.returncode == 0 else git.text("rev-parse", "HEAD")


def records_of(git: Git) -> dict[str, str]:
    """name -> commit of the stack's branch and records that are there. A damaged record is none."""
    out = git.text("for-each-ref", "--format=%(refname) %(objectname)", BRANCH_REF, BASE_REF, APPLIED_REF)
    return dict(line.split(" ") for line in out.splitlines())


def settings_of(git: Git, place: foreign.Place) -> dict[str, str]:
    """Our keys in the repository's own configuration."""
    done = git.try_run("config", "--file", str(place.common_dir / "config"), "--no-includes", "--null", "--get-regexp", r"^patchstack\.")
    return dict(record.split("\n", 1) for record in done.stdout.decode("utf-8", "surrogateescape").split("\0") if "\n" in record)


def owners_of(place: foreign.Place) -> dict[str, tuple[int, int]]:
    """Owner and group of what is there of the files that git replaces, and of the folders that it makes."""
    found = {}
    for name in (*_MADE, *_WRITTEN, *_LOGS):
        path = _path(place, name)
        if os.path.lexists(path):
            found[name] = (path.lstat().st_uid, path.lstat().st_gid)
    return found


def _path(place: foreign.Place, name: str) -> pathlib.Path:
    return (place.git_dir if name in ("index", "HEAD", "logs/HEAD") else place.common_dir) / name


def _lock_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.lock")


def refuse_links(place: foreign.Place) -> None:
    """Refuse a repository of which parts are elsewhere: what is written there would land in the other place, whosever that is."""
    for path in (place.top / ".git", *(_path(place, name) for name in (*_FOLDERS, *_MADE, *_WRITTEN, *_LOGS))):
        if path.is_symlink():
            raise Refused(f"{path} is a link to {os.readlink(path)}: what is written in a tree must stay in it", "apply to a new --dest, with --source pointing here if you like")


def refuse_locked(place: foreign.Place) -> None:
    """Refuse while another git command works in the repository."""
    for name in _WRITTEN:
        lock = _lock_of(_path(place, name))
        if os.path.lexists(lock):
            if name == "index" and _is_ours(lock):
                continue
            raise Refused(f"another git command works in {place.top}: {lock} exists", "wait until it has ended, or remove that file if there is none; nothing was changed")


def refuse_checked_out(place: foreign.Place) -> None:
    """Refuse to move a branch that another worktree of the repository stands on."""
    for head in sorted((place.common_dir / "worktrees").glob("*/HEAD")):
        if head.is_file() and head.read_bytes().strip() == f"ref: {BRANCH_REF}".encode():
            where = (head.parent / "gitdir").read_text(encoding="utf-8", errors="surrogateescape").strip().removesuffix("/.git")
            raise Refused(f"the branch {BRANCH} of {place.top} is checked out in another worktree: {where}", f"git -C {where} checkout --detach   and run the same command again; nothing was changed")


def _is_ours(lock: pathlib.Path) -> bool:
    """Whether an index.lock was made here: by a killed run, since whoever asks holds the desk."""
    try:
        return not lock.is_symlink() and lock.stat().st_size == len(_OUR_LOCK) and lock.read_bytes() == _OUR_LOCK
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _index_locked(place: foreign.Place, folder: pathlib.Path):
    """Hold git's lock of the index, under a content that tells ours from anybody else's. `folder`: a place of our own beside it."""
    lock, token = place.git_dir / "index.lock", folder / "index.token"
    if _is_ours(lock):
        lock.unlink()
    workspace.write(token, _OUR_LOCK)
    try:
        try:
            os.link(token, lock)
        except PermissionError:  # no hard links on this file system
            with lock.open("xb") as f:
                f.write(_OUR_LOCK)
    except FileExistsError:
        raise Refused(f"another git command works in {place.top}: {lock} exists", "wait until it has ended, or remove that file if there is none; everything was taken back") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


class Mover(Finish):
    """Carries out a Move in an open foreign repository."""

    def __init__(self, git: Git, place: foreign.Place, folder: pathlib.Path, move: Move, note: Callable[[str], None]) -> None:
        """`folder`: the desk, for what is not ready yet."""
        self._git, self._place, self._folder, self._move, self._note = git, place, folder, move, note

    @classmethod
    def recorded(cls, git: Git, place: foreign.Place, folder: pathlib.Path, data: dict, note: Callable[[str], None]) -> "Mover":
        """The one that a journal describes. Raises Refused if HEAD is somewhere else by now."""

        def pairs(values: dict) -> dict:
            return {key: (value[0], value[1]) for key, value in values.items()}

        move = Move(data["command"], pairs(data["index"]), pairs(data["refs"]), (data["head"][0], data["head"][1]), pairs(data["settings"]), pairs(data["owners"]))
        mover = cls(git, place, folder, move, note)
        mover._clear_locks()
        head = head_of(git)
        if head not in move.head:
            raise Refused(f"`{move.command}` in {place.top} was interrupted, and HEAD has moved since: it is {head}, it was {move.head[0]}",
                          f"put HEAD back (git -C {place.top} checkout {move.head[0].removeprefix('ref: refs/heads/')}), then run the same command again")  # fmt: skip
        return mover

    def forward(self, recovering: bool) -> None:
        self._go(1, check=not recovering)

    def back(self) -> None:
        self._go(0, check=False)

    def _go(self, side: int, *, check: bool) -> None:
        """`check`: nothing was done yet, and the refs must be where they were."""
        try:
            if check or not self._index_is(side):
                self._index(side)
            self._refs(side, check)
            self._settings(side, check)
            self._head(side, check)
            self._refs_gone(side)
        finally:
            self._give_back()

    def _index(self, side: int) -> None:
        """Put the stack's paths into the index as they are on the disk."""
        wanted = {path: sides[side] for path, sides in self._move.index.items()}
        if not wanted:
            return
        index, new = self._place.git_dir / "index", self._folder / "index"
        with _index_locked(self._place, self._folder):
            for left in (new, _lock_of(new)):  # of a killed git
                left.unlink(missing_ok=True)
            if index.exists():
                shutil.copy2(index, new)
            git = self._git.with_index(new)
            # From the files, so that the index knows their sizes and times; by their ids where git's conversions would say something else.
            git.try_run("update-index", "--add", "--remove", "-z", "--stdin", input="".join(f"{path}\0" for path in wanted).encode("utf-8", "surrogateescape"), env={"GIT_WORK_TREE": str(self._place.top)})
            if not self._index_is(side, git):
                lines = [f"{blob or '0 ' + '0' * 40}\t{path}\0" for path, blob in wanted.items()]
                git.run("update-index", "-z", "--index-info", input="".join(sorted(lines)).encode("utf-8", "surrogateescape"))
            os.replace(new, index)

    def _index_is(self, side: int, git: Git | None = None) -> bool:
        """Whether the index has the stack's paths so already: then no lock is needed."""
        wanted = {path: sides[side] for path, sides in self._move.index.items()}
        out = (git or self._git).run("ls-files", "--stage", "-z", "--", *wanted, env={"GIT_LITERAL_PATHSPECS": "1"}) if wanted else b""
        records = (record.split("\t", 1) for record in out.decode("utf-8", "surrogateescape").split("\0") if record)
        return {path: meta.removesuffix(" 0") for meta, path in records} == {path: blob for path, blob in wanted.items() if blob}

    def _refs(self, side: int, check: bool) -> None:
        damaged = any(sides[0] is None and (self._place.common_dir / name).exists() for name, sides in self._move.refs.items())
        there, lines = {name: sides[0] for name, sides in self._move.refs.items()} if check and not damaged else self._records(), []
        for name, sides in self._move.refs.items():
            if sides[side] not in (None, there.get(name)):
                lines.append(f"update {name}\0{sides[side]}\0{(sides[1 - side] or '0' * 40) if check else ''}\0")
        if lines:
            self._git.run("update-ref", "-z", "--stdin", "-m", f"patchstack: {self._move.command}", input="".join(lines).encode())

    def _records(self) -> dict[str, str]:
        """The records that are there. A truncated one counts as absent, and goes: git will not replace it."""
        there = records_of(self._git)
        for name in {BASE_REF, APPLIED_REF} - there.keys():
            (self._place.common_dir / name).unlink(missing_ok=True)
        return there

    def _settings(self, side: int, check: bool) -> None:
        file, there = str(self._place.common_dir / "config"), {key: sides[0] for key, sides in self._move.settings.items() if sides[0]} if check else settings_of(self._git, self._place)
        for key, sides in self._move.settings.items():
            if sides[side] is None and key in there:
                self._git.run("config", "--file", file, "--unset-all", key)
            elif sides[side] != there.get(key):
                self._git.run("config", "--file", file, key, sides[side])
        if self._move.settings and all(sides[side] is None for sides in self._move.settings.values()):  # git leaves an empty section behind
            self._git.try_run("config", "--file", file, "--remove-section", "patchstack")

    def _head(self, side: int, check: bool) -> None:
        to = self._move.head[side]
        if (self._move.head[0] if check else head_of(self._git)) == to:
            return
        why = ("-m", f"patchstack: {self._move.command}")
        if to.startswith("ref: "):
            self._git.run("symbolic-ref", *why, "HEAD", to.removeprefix("ref: "))
        else:
            self._git.run("update-ref", "--no-deref", *why, "HEAD", to)

    def _refs_gone(self, side: int) -> None:
        """Branches go last: HEAD may have been on one."""
        gone = [name for name, sides in self._move.refs.items() if sides[side] is None]
        if gone and (there := self._records().keys() & set(gone)):
            self._git.run("update-ref", "-z", "--stdin", input="".join(f"delete {name}\0\0" for name in sorted(there)).encode())

    def _give_back(self) -> None:
        """Under sudo, git's new files belong to root: give each to the owner of the one it replaced, or of its folder."""
        if os.geteuid() != 0:
            return
        for name in (*_MADE, *_WRITTEN, *_LOGS):
            path = _path(self._place, name)
            if os.path.lexists(path):
                there, folder = path.lstat(), path.parent.lstat()
                owner = self._move.owners.get(name) or (folder.st_uid, folder.st_gid)
                if (there.st_uid, there.st_gid) != owner:
                    os.chown(path, *owner, follow_symlinks=False)

    def _clear_locks(self) -> None:
        """Remove the lock files that a killed git of ours left. One of a git that works is gone, or another one, a moment later."""
        if _is_ours(index := self._place.git_dir / "index.lock"):
            index.unlink()
        locks = [_lock_of(_path(self._place, name)) for name in _WRITTEN if name != "index"]
        left = {lock: lock.lstat().st_ino for lock in locks if os.path.lexists(lock)}
        if not left:
            return
        time.sleep(_STALE_AFTER)
        for lock, inode in left.items():
            if os.path.lexists(lock) and lock.lstat().st_ino == inode:
                self._note(f"{lock} was left by the interrupted run: removed")
                lock.unlink()
