# SPDX-License-Identifier: Apache-2.0
"""What state a directory is in: decided by the content of its files alone, so that a lost or damaged record changes nothing."""
import pathlib
import shlex
from dataclasses import dataclass, field, replace

from . import foreign, inplace, installed, worktree
from .disk import Disk
from .errors import GitError, Usage
from .git import Git
from .gitstate import APPLIED_REF, BASE_REF
from .journal import RENAMING, Journal
from .lock import Lock, load_lock
from .pins import Base
from .report import Ui
from .worktree import Seen

UNAPPLIED, APPLIED, MODIFIED, PARTIAL, WRONG_BASE, INTERRUPTED = "unapplied", "applied", "modified", "partial", "wrong base", "interrupted"


@dataclass(frozen=True)
class State:
    """`level`: exact (whole tree as locked) or touched (each path the stack touches). `next_step`: the command to run. `seen`: of a git work tree, what was read."""

    kind: str
    base: Base | None
    level: str | None
    detail: str
    next_step: str
    seen: Seen | None = field(default=None, repr=False)


def command(name: str, target: pathlib.Path, *more: str) -> str:
    """A command line of this tool, ready to paste."""
    return " ".join(["python apply.py", name, *more, shlex.quote(str(target))])


def known_locks(bases: list[Base]) -> list[tuple[Base, Lock]]:
    """The bases that have a lock. Raises Usage if none has."""
    locks = [(base, load_lock(base.folder)) for base in bases if (base.folder / "lock.json").exists()]
    if not locks:
        raise Usage(f"no base has a lock.json: {', '.join(str(b.folder) for b in bases)}", "write one with `apply.py export DIR --base BASE`")
    return locks


def inspect(target: pathlib.Path, bases: list[Base], ui: Ui) -> State:
    """The state of `target`, against the bases whose locks exist: every file is read. Raises Usage if it is no directory."""
    if not target.is_dir():
        raise Usage(f"{target} is not a directory", f"python apply.py apply --dest {shlex.quote(str(target))}")
    locks = known_locks(bases)
    place = foreign.find(target) if (target / ".git").exists() else None  # never the repository above
    if place is not None:
        if left := inplace.interrupted(place, ui.note):
            return _interrupted(target, left)
        with foreign.opened(place, ui.git) as git:
            if seen := worktree.look(target, git):
                return judge(git, target, seen, locks)
    return _inspect_directory(target, locks)


def head_holds(git: Git, lock: Lock, side: int) -> bool:
    """Whether HEAD, by its own account, has each touched path as upstream (0) or as the stack (1) has it. A first look, that reads no file."""
    try:
        there = git.blobs("HEAD", sorted(lock.touched))
    except GitError:  # no commit yet
        return False
    return there == {path: sides[side] for path, sides in lock.touched.items() if sides[side]}


def _interrupted(target: pathlib.Path, left: Journal) -> State:
    what = "will be finished" if left.phase == RENAMING else "will be taken back"
    again = command("unapply", target) if left.command == "unapply" else command("apply", target, "--dest")
    return State(INTERRUPTED, None, None, f"`{left.command}` was killed while it changed {len(left.changes)} files; by the next command that changes the tree it {what} first", again)


def _compare(lock: Lock, found: dict[str, str]) -> tuple[list[str], list[str]]:
    """(paths that are not as upstream has them, paths that are not as the stack leaves them)."""
    not_before = [p for p, (before, _) in lock.touched.items() if found.get(p) != before]
    not_after = [p for p, (_, after) in lock.touched.items() if found.get(p) != after]
    return not_before, not_after


def _judge(base: Base, lock: Lock, tree: str | None, found: dict[str, str], target: pathlib.Path) -> State | None:
    """The state if `found` is upstream, the whole stack, or a prefix of it; None otherwise. `tree`: of all files, if all were read."""
    exact_before, exact_after = tree == lock.base_tree, tree == lock.result_tree
    not_before, not_after = _compare(lock, found)
    if exact_after or (lock.touched and not not_after):
        return State(APPLIED, base, "exact" if exact_after else "touched", f"{len(lock.patches)} patches and {len(lock.overlay)} overlay files on {base.tag}", command("verify", target))
    if exact_before or (lock.touched and not not_before):
        return State(UNAPPLIED, base, "exact" if exact_before else "touched", f"upstream {base.tag}", command("apply", target, "--ref", base.tag, "--dest"))
    prefix = next((i for i, p in enumerate(lock.patches, 1) if p.post_tree == tree), None)
    if prefix:
        return State(PARTIAL, base, "exact", f"{prefix} of {len(lock.patches)} patches, up to {lock.patches[prefix - 1].topic}",
                     f"check out upstream {base.tag}, then " + command("apply", target, "--ref", base.tag, "--dest"))  # fmt: skip
    if lock.touched and not set(not_before) & set(not_after):
        done = len(lock.touched) - len(not_after)
        return State(PARTIAL, base, "touched", f"{done} of {len(lock.touched)} files are patched, the others are upstream's; for example {sorted(not_after)[0]}",
                     f"check out upstream {base.tag}, then " + command("apply", target, "--ref", base.tag, "--dest"))  # fmt: skip
    return None


def _wrong(locks: list[tuple[Base, Lock]], founds: list[dict[str, str]]) -> State:
    """No base fits: say which is nearest and where it differs."""
    # a file counts as different when it is neither upstream's nor the stack's
    differ_from = [sorted(set(before) & set(after)) for before, after in (_compare(lock, found) for (_, lock), found in zip(locks, founds, strict=True))]
    near = min(range(len(locks)), key=lambda i: len(differ_from[i]) / max(1, len(locks[i][1].touched)))
    (base, lock), differ = locks[near], differ_from[near]
    detail = f"nearest is {base.tag}: {len(differ)} of {len(lock.touched)} files that the stack touches differ ({', '.join(differ[:4])}{', ...' if len(differ) > 4 else ''})"
    return State(WRONG_BASE, None, None, detail, f"python apply.py apply --ref {base.tag} --dest NEW_DIRECTORY")


def judge(git: Git, target: pathlib.Path, seen: Seen, locks: list[tuple[Base, Lock]]) -> State:
    """The state of a git work tree, from what was read of it."""
    found = _judge_git(git, target, seen, locks)
    if seen.unread != 0 and found.level == "exact":
        found = replace(found, level="touched", detail=f"{found.detail}; {seen.unread or 'the'} other files were not read")
    return replace(found, seen=seen)


def _judge_git(git: Git, target: pathlib.Path, seen: Seen, locks: list[tuple[Base, Lock]]) -> State:
    state = next((s for base, lock in locks if (s := _judge(base, lock, seen.tree, seen.files, target))), None)
    if state and state.kind == APPLIED and state.level == "touched" and git.resolve(f"{APPLIED_REF}^{{tree}}") not in (None, seen.tree):
        state = None  # commits on files that no patch touches are commits that patches/ does not have, too
    if state is None or seen.dirty:
        recorded = git.resolve(f"{BASE_REF}^{{tree}}")
        base = state.base if state else None
        if base is None and recorded:
            before = [git.blobs(recorded, sorted(lock.touched)) for _, lock in locks]
            base = next((b for (b, lock), found in zip(locks, before, strict=True) if recorded == lock.base_tree or (lock.touched and not _compare(lock, found)[0])), None)
        if base is None:
            return _wrong(locks, [seen.files] * len(locks))
        if seen.dirty:
            what = f"uncommitted changes in {len(seen.dirty)} files ({', '.join(seen.dirty[:4])}{', ...' if len(seen.dirty) > 4 else ''})"
            then = "commit them with a Topic: trailer (or as a fixup), then " + command("export", target)
        elif seen.head == git.resolve(APPLIED_REF):
            return State(MODIFIED, base, None, "an older or other version of the stack is applied", command("apply", target, "--ref", base.tag, "--dest"))
        else:
            what, then = "commits that patches/ does not have", command("export", target)
        return State(MODIFIED, base, None, what, then)
    return state


def _inspect_directory(target: pathlib.Path, locks: list[tuple[Base, Lock]]) -> State:
    if package := installed.find(target):
        return _inspect_installed(target, package, locks)
    disk = Disk(target)
    founds = [{path: blob for path, blob in disk.blobs(lock.touched).items() if blob} for _, lock in locks]
    state = next((s for (base, lock), found in zip(locks, founds, strict=True) if (s := _judge(base, lock, None, found, target))), None)
    if state is None:
        return _wrong(locks, founds)
    if state.kind == UNAPPLIED:
        return replace(state, detail=f"{state.detail} (a plain directory)", next_step=f"python apply.py apply --ref {state.base.tag} --source {shlex.quote(str(target))} --dest NEW_DIRECTORY")
    return state


def _inspect_installed(target: pathlib.Path, package: installed.Package, locks: list[tuple[Base, Lock]]) -> State:
    """A package that pip installed: its files below vllm/, by content alone, since pip sets permissions as it likes."""
    parts = [(base, installed.part(lock)) for base, lock in locks]
    founds = [installed.blobs(target, lock) for _, lock in parts]
    whence = f"installed from a {'patched ' if package.patchset else ''}wheel"
    state = next((s for (base, lock), found in zip(parts, founds, strict=True) if (s := _judge(base, lock, None, found, target))), None)
    if state is not None and state.kind in (UNAPPLIED, APPLIED):
        return replace(state, detail=f"{state.detail} ({whence})", next_step=state.next_step if state.kind == APPLIED else f"python apply.py wheel --ref {state.base.tag}")
    of = next((i for i, (base, _) in enumerate(parts) if base.tag == package.tag), None)
    if of is None:
        return _wrong(parts, founds)
    base, lock = locks[of]
    if package.patchset != lock.patchset:
        return State(MODIFIED, base, None, f"{whence} of another version of the stack ({str(package.patchset)[:8]}, this is {lock.patchset[:8]})", f"python apply.py wheel --ref {base.tag}")
    edited = _compare(parts[of][1], founds[of])[1]
    shown = f"{', '.join(edited[:4])}{', ...' if len(edited) > 4 else ''}"
    return State(MODIFIED, base, None, f"{whence}; {len(edited)} files were changed since ({shown})", f"python apply.py wheel --ref {base.tag}   and install it anew")
