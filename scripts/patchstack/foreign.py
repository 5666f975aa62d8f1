# SPDX-License-Identifier: Apache-2.0
"""A git repository that somebody else made, read so that nothing of it runs.

Its configuration, attributes and hooks could name programs: filters, fsmonitor, promisor remotes and their transports, gpg,
textconv, aliases. So git is given a directory of our own as the common one (GIT_COMMON_DIR): our configuration, no
hooks, no attributes, no remotes; `refs`, `packed-refs`, `logs` and `objects` in it are links to theirs. HEAD and the index are
read where they are. An object that a partial clone lacks is missing then: nothing is fetched.
"""
import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import workspace
from .errors import GitError, Refused
from .git import Git

_LINKED = ("refs", "packed-refs", "objects")
_HARMLESS = {"noop", "preciousobjects", "partialclone", "worktreeconfig", "relativeworktrees"}  # they change nothing of what is read here
_SHARED = re.compile(r"0[0-7]{3}|group|true|1|all|world|everybody|2|umask|false|0")


@dataclass(frozen=True)
class Place:
    """Where a repository is. `git_dir` has HEAD and the index; `common_dir` the refs, objects and configuration: another one in a linked worktree."""

    top: pathlib.Path
    git_dir: pathlib.Path
    common_dir: pathlib.Path

    @property
    def linked(self) -> bool:
        """Whether this is a linked worktree or a submodule."""
        return self.git_dir != self.common_dir or (self.top / ".git").is_file()

    @property
    def objects(self) -> pathlib.Path:
        return self.common_dir / "objects"


def find(top: pathlib.Path) -> Place | None:
    """The repository whose top level, or bare git directory, is `top`; None for another directory. Never one above."""
    dot = top / ".git"
    if dot.is_file():
        match = re.match(rb"gitdir: ([^\n]+)", _head(dot))
        git_dir = top / os.fsdecode(match[1].rstrip(b"\r")) if match else None
    elif dot.is_dir():
        git_dir = dot
    else:
        git_dir = top
    if git_dir is None or not (git_dir / "HEAD").is_file():
        return None
    common = git_dir / os.fsdecode(_head(git_dir / "commondir").strip()) if (git_dir / "commondir").is_file() else git_dir
    if not (common / "objects").is_dir() or not (common / "refs").is_dir():
        return None
    return Place(top, git_dir, pathlib.Path(os.path.normpath(common)) if common != git_dir else git_dir)


def _head(path: pathlib.Path) -> bytes:
    """The first bytes of a small file."""
    with path.open("rb") as f:
        return f.read(8192)


@contextlib.contextmanager
def opened(place: Place, log: Callable[[str], None] | None = None) -> Iterator[Git]:
    """Git commands in a foreign repository. Raises Refused where its format is not understood."""
    with workspace.temporary() as door:
        yield _open(place, door, log)


def opened_for_good(place: Place, log: Callable[[str], None] | None = None) -> Git:
    """The same, until this run ends."""
    return _open(place, workspace.until_the_end(), log)


def _open(place: Place, door: pathlib.Path, log: Callable[[str], None] | None) -> Git:
    (door / "config").write_text("[core]\n\tbare = false\n")
    shutil.copyfile(place.git_dir / "HEAD", door / "HEAD")  # for those who take the door for a whole repository
    for name in _LINKED:
        (door / name).symlink_to((place.common_dir / name).absolute())
    if (place.common_dir / "logs").is_dir():
        (door / "logs").symlink_to((place.common_dir / "logs").absolute())
    if (place.common_dir / "shallow").is_file():
        shutil.copyfile(place.common_dir / "shallow", door / "shallow")
    git = Git(pathlib.Path("/"), git_dir=place.git_dir.absolute(), common_dir=door, log=log)  # nowhere near a file that an argument could mean
    _take_settings(git, place, door)
    return git


def _take_settings(git: Git, place: Place, door: pathlib.Path) -> None:
    """Look at what the repository's own configuration says of its format; keep the permissions that it wants for new files."""
    config = place.common_dir / "config"
    if not config.is_file():
        return
    try:
        listed = git.text("config", "--file", str(config.absolute()), "--no-includes", "--null", "--list")
    except GitError as e:
        raise Refused(f"{config} cannot be read: {e.stderr.strip()}", "mend it, or clone the repository anew") from None
    settings = {key.lower(): value for key, _, value in (record.partition("\n") for record in listed.split("\0") if record)}
    version = settings.get("core.repositoryformatversion", "0")
    extensions = {k.removeprefix("extensions."): v for k, v in settings.items() if k.startswith("extensions.")}
    strange = [f"extensions.{name} = {value}" for name, value in sorted(extensions.items())
               if name not in _HARMLESS and (name, value) not in (("objectformat", "sha1"), ("refstorage", "files"))]  # fmt: skip
    if version not in ("0", "1") or strange:
        raise Refused(f"{place.top} is a repository of another format ({', '.join(strange) or f'core.repositoryformatversion = {version}'}): this tool reads SHA-1 repositories with refs in files",
                      "give a clone in that format (`git init --object-format=sha1 --ref-format=files`, then fetch into it)")  # fmt: skip
    if _SHARED.fullmatch(settings.get("core.sharedrepository", "")):
        with (door / "config").open("a") as f:
            f.write(f"\tsharedRepository = {settings['core.sharedrepository']}\n")
