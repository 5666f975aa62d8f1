# SPDX-License-Identifier: Apache-2.0
"""`apply` and `unapply` in a tree that exists: which files change to what, and what becomes of its branches."""
import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator

from . import change, foreign, gitstate, journal, workspace
from .change import Edit
from .disk import EXECUTABLE, FILE, Disk
from .errors import Refused
from .foreign import Place
from .git import Git
from .gitstate import APPLIED_REF, BASE_REF, BEFORE_KEY, BRANCH, BRANCH_REF, TAG_KEY, UPSTREAM_BRANCH, Move, Mover
from .journal import Desk, Journal
from .overlay import blob_id
from .patchfile import unsafe_path
from .pins import Base
from .report import Ui
from .stack import Built
from .worktree import Seen

DESK = "patchstack"  # in the git directory


def place_of(target: pathlib.Path) -> Place:
    """The repository whose top level is `target`. Raises Refused for anything else."""
    place = foreign.find(target)
    if place is None or not (target / ".git").exists():
        raise Refused(f"{target} exists and is no git repository", "choose another --dest, or give it as --source")
    return place


def refuse_linked(place: Place) -> None:
    """A linked worktree shares its branches and records with others; so does a repository of links."""
    gitstate.refuse_links(place)
    if place.linked:
        raise Refused(f"{place.top} is a linked worktree or a submodule of another repository", "apply to a new --dest, with --source pointing here if you like")


def interrupted(place: Place, note: Callable[[str], None]) -> Journal | None:
    """What a killed run left half-done in `place`, changing nothing."""
    return journal.left_in(place.git_dir, DESK, note)


def tidy(place: Place, note: Callable[[str], None]) -> None:
    """Remove what killed runs left in and beside a tree in which there is nothing to do."""
    workspace.clear(place.top.parent, scratch_prefix(place.top))
    journal.tidy(place.git_dir, DESK, note)


def scratch_prefix(target: pathlib.Path) -> str:
    """What scratch folders beside a destination are called."""
    return f".{target.name}.patchstack-"


@contextlib.contextmanager
def held(place: Place, git: Git, ui: Ui) -> Iterator[Desk]:
    """Hold the tree against other runs; first finish or take back what a killed one left, and say so."""
    refuse_linked(place)
    with journal.desk(place.git_dir, DESK, ui.note) as desk:
        if desk.found is not None:
            ui.note(f"{place.top}: {change.recover(desk, place.top, Mover.recorded(git, place, desk.folder, desk.found.git, ui.note))}")
        yield desk


def refuse_dirty(target: pathlib.Path, seen: Seen, coming: set[str] = frozenset()) -> None:
    """Refuse local changes, files that are not checked out, and untracked files that stand where a new file of the stack goes."""
    disk = Disk(target)
    in_the_way = set()
    for path in coming - seen.files.keys():
        parents = [str(p) for p in pathlib.PurePosixPath(path).parents][-2::-1]
        in_the_way |= {p for p in parents if disk.exists(p) and not (target / p).is_dir() and p not in seen.files} | ({path} if disk.exists(path) else set())
    if seen.sparse:
        raise Refused(f"{target} is a sparse checkout without files that the stack changes: {', '.join(seen.sparse[:4])}{', ...' if len(seen.sparse) > 4 else ''}",
                      f"check them out (`git -C {target} sparse-checkout add FOLDER`, or `disable`), then run the same command again; nothing was changed")  # fmt: skip
    if seen.dirty or in_the_way:
        shown = "".join(f"\n- {p}" for p in seen.dirty[:8]) + (f"\n- and {len(seen.dirty) - 8} more" if len(seen.dirty) > 8 else "")
        shown += "".join(f"\n- {p} (untracked, where the stack puts a file)" for p in sorted(in_the_way))
        raise Refused(f"{target} has local changes:{shown}", f"commit or stash them (`git -C {target} stash -u`), then run the same command again; nothing was changed")


def apply(place: Place, git: Git, desk: Desk, seen: Seen, base: Base, built: Built, scratch: Git, ui: Ui) -> None:
    """Put the patched files where upstream's (or an older stack's) are, and HEAD on the stack's branch."""
    now, there, settings = gitstate.head_of(git), gitstate.records_of(git), gitstate.settings_of(git, place)
    before = now.removeprefix("ref: refs/heads/") if now.startswith("ref: ") else seen.head
    if before == BRANCH:
        before = settings.get(BEFORE_KEY, UPSTREAM_BRANCH)
    stands = there.get(BRANCH_REF)
    if stands and now != f"ref: {BRANCH_REF}" and not _known(scratch, stands, (built.commit, there.get(APPLIED_REF))):
        raise Refused(f"{place.top} has a branch {BRANCH} ({stands[:12]}) with commits that `apply` did not make", f"rename it: git -C {place.top} branch -m {BRANCH} my-{BRANCH}; nothing was changed")
    refs = {BASE_REF: built.base_commit, APPLIED_REF: built.commit, BRANCH_REF: built.commit}
    _change("apply", place, git, desk, seen, built.tree, scratch, _sides(there, refs), (now, f"ref: {BRANCH_REF}"), _sides(settings, {TAG_KEY: base.tag, BEFORE_KEY: before}), ui)


def _sides(there: dict[str, str], wanted: dict[str, str | None]) -> dict[str, tuple[str | None, str | None]]:
    """(what is, what is to be) of each key of `wanted`."""
    return {key: (there.get(key), value) for key, value in wanted.items()}


def _known(git: Git, commit: str, tips: tuple[str | None, ...]) -> bool:
    """Whether nothing is lost if a branch leaves `commit` for one of `tips`."""
    return any(tip and git.ok("merge-base", "--is-ancestor", commit, tip) for tip in tips)


def unapply(place: Place, git: Git, desk: Desk, seen: Seen, base_commit: str, ui: Ui) -> None:
    """Put upstream's files back, HEAD where it was before `apply`, and forget the stack."""
    there, settings = gitstate.records_of(git), gitstate.settings_of(git, place)
    before = settings.get(BEFORE_KEY)
    head = f"ref: refs/heads/{before}" if before and git.resolve(f"refs/heads/{before}") == base_commit else base_commit
    with Git.scratch(place.common_dir, log=ui.git) as scratch:
        _change("unapply", place, git, desk, seen, f"{base_commit}^{{tree}}", scratch, _sides(there, dict.fromkeys((BRANCH_REF, BASE_REF, APPLIED_REF))),
                (gitstate.head_of(git), head), _sides(settings, dict.fromkeys((TAG_KEY, BEFORE_KEY))), ui)  # fmt: skip


def _change(command: str, place: Place, git: Git, desk: Desk, seen: Seen, tree: str, scratch: Git, refs: dict, head: tuple[str, str], settings: dict, ui: Ui) -> None:
    gitstate.refuse_locked(place)
    gitstate.refuse_checked_out(place)
    edits, index = _edits(scratch, seen, tree, place)
    emptied = _folders(e.path for e in edits if e.after is None)
    if emptied:
        emptied -= set(scratch.text("ls-tree", "-d", "-z", "--name-only", tree, "--", *sorted(emptied)).split("\0"))
    take_objects(scratch.git_dir, place, desk)
    move = Move(command, index, refs, head, settings, gitstate.owners_of(place))
    ui.step(f"changing {len(edits)} files in {place.top}")
    change.run(desk, place.top, command, edits, Mover(git, place, desk.folder, move, ui.note), emptied=tuple(sorted(emptied)), git=move.record())


def _folders(paths: Iterable[str]) -> set[str]:
    """Every folder above the paths."""
    return {str(folder) for path in paths for folder in pathlib.PurePosixPath(path).parents} - {"."}


def _edits(git: Git, seen: Seen, tree: str, place: Place) -> tuple[list[Edit], dict[str, tuple[str | None, str | None]]]:
    """The files that differ between HEAD and `tree`, with their contents checked against their ids; and the same for the index."""
    out = git.text("diff-tree", "-r", "-z", "--raw", "--no-abbrev", "--no-renames", seen.head, tree)
    fields = out.split("\0")
    changes = {path: meta.removeprefix(":").split(" ") for meta, path in zip(fields[::2], fields[1::2], strict=False)}
    strange = [repr(path) for path, (old, new, *_) in changes.items() if unsafe_path(path) or not {old, new} <= {FILE, EXECUTABLE, "000000"}]
    if strange:
        raise Refused(f"the commits in {place.top} change what this stack never does, a link or a path that leaves the tree: {', '.join(strange[:6])}", "nothing was changed; apply to a new --dest")
    contents = read_blobs(git, [oid for _, new, _, oid, _ in changes.values() if new != "000000"], place.top)
    edits, index = [], {}
    for path, (old, new, old_id, new_id, _) in changes.items():
        before = None if old == "000000" else f"{old} {old_id}"
        index[path] = (before, None if new == "000000" else f"{new} {new_id}")
        edits.append(Edit(path, before, None if new == "000000" else (new, contents[new_id])))
    return edits, index


def read_blobs(git: Git, oids: list[str], where: pathlib.Path) -> dict[str, bytes]:
    """The contents of blobs, each hashed. Raises Refused where an object is missing or is not what its name says."""
    out = git.run("cat-file", "--batch", input="".join(f"{oid}\n" for oid in oids).encode())
    found, at = {}, 0
    for oid in oids:
        end = out.index(b"\n", at)
        words = out[at:end].split(b" ")
        if words[-1] == b"missing":
            raise Refused(f"the repository of {where} lacks the object {oid} (a partial clone?)", f"git -C {where} fetch --refetch, or apply to a new --dest")
        size = int(words[2])
        data, at = out[end + 1 : end + 1 + size], end + size + 2
        if words[1] != b"blob" or blob_id(data) != oid:
            raise Refused(f"the object {oid} in the repository of {where} is damaged: its content has another id", f"git -C {where} fsck   shows what else is; a new clone mends it")
        found[oid] = data
    return found


def take_objects(source: pathlib.Path, place: Place, desk: Desk) -> None:
    """Copy the objects that a scratch repository made; each appears whole, a pack before its index. Under sudo they belong to the owner of the others."""
    for pattern in ("[0-9a-f][0-9a-f]/*", "pack/*.pack", "pack/*.rev", "pack/*.idx"):
        for file in sorted((source / "objects").glob(pattern)):
            target = place.objects / file.relative_to(source / "objects")
            if target.exists():
                continue
            if not target.parent.exists():
                target.parent.mkdir()
                workspace.give_to_owner_of(place.objects, target.parent)
            elif target.parent.is_symlink():
                raise Refused(f"{target.parent} is a link", "apply to a new --dest, with --source pointing here if you like; nothing was changed")
            for new in (desk.folder / "object", target.with_name(f"tmp_obj_{os.urandom(6).hex()}")):  # git removes old ones of that name
                workspace.write_through(new, file.read_bytes())
                os.chmod(new, 0o444 & ~workspace.umask())
                workspace.give_to_owner_of(place.objects, new)
                try:
                    os.rename(new, target)
                    break
                except OSError as e:
                    new.unlink()
                    if e.errno != errno.EXDEV:  # the objects are on another file system
                        raise
