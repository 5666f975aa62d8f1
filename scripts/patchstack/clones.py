# SPDX-License-Identifier: Apache-2.0
"""One commit out of a git repository on this machine, in whatever state that is: bare, shallow, a linked worktree, of another user.

`git fetch` would ask the repository's own git, which refuses those of other users and obeys their configuration. Here its
objects are read through a repository of ours, and every id is computed again from the content on the way.
"""
import pathlib

from . import foreign
from .errors import GitError, Refused, Unavailable
from .git import Git, write_shallow
from .pins import Base
from .report import Ui


def find(path: pathlib.Path) -> foreign.Place | None:
    """The repository at `path`, None for a plain directory. Raises Refused for half a repository."""
    place = foreign.find(path)
    if place is None and (path / ".git").exists():
        raise Refused(f"{path / '.git'} is no whole git repository (is the one that it points to gone?)", "give another --source; a copy of the directory without .git works too")
    return place


def find_commit(place: foreign.Place, base: Base, ui: Ui) -> str:
    """The commit of the tag, else the pinned commit. Raises Unavailable where the repository has neither."""
    with foreign.opened(place, ui.git) as git:
        commit = git.resolve(f"refs/tags/{base.tag}^{{commit}}") or git.resolve(f"{base.commit}^{{commit}}")
    if commit is None:
        raise Unavailable(f"{place.top} has neither the tag {base.tag} nor commit {base.commit}{_state(place)}", f"git -C {place.top} fetch origin tag {base.tag}, or another --source")
    return commit


def _state(place: foreign.Place) -> str:
    """What may be why something is missing."""
    states = [name for name, there in (("shallow", (place.common_dir / "shallow").exists()), ("partial", any((place.objects / "pack").glob("*.promisor")))) if there]
    return f" (it is a {' and '.join(states)} clone)" if states else ""


def copy_commit(place: foreign.Place, commit: str, into: Git, ui: Ui) -> None:
    """Copy `commit` without its parents into the new repository `into`. Raises Refused where objects are missing or damaged."""
    with Git.scratch(place.common_dir, log=ui.git) as git:
        write_shallow(git.git_dir, [commit])
        write_shallow(into.git_dir, [commit])
        try:
            into.run("index-pack", "--stdin", input=git.run("pack-objects", "--revs", "--stdout", "--quiet", input=f"{commit}\n".encode()))
            into.run("rev-list", "--objects", "--quiet", commit)
        except GitError as e:
            if e.exit_code == Refused.exit_code:
                raise
            raise Refused(f"{place.top} has commit {commit[:12]}, but not all of its files, or damaged ones{_state(place)}:\n  {e.stderr.strip()}",
                          f"git -C {place.top} fsck   says what is wrong (a partial clone: git -C {place.top} fetch --refetch --no-filter); or another --source") from None  # fmt: skip
