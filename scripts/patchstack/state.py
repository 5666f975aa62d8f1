# SPDX-License-Identifier: Apache-2.0
"""What state a directory is in: decided by content alone, so that a lost or damaged record changes nothing."""
import os
import pathlib
import shlex
from dataclasses import dataclass, replace

from . import place
from .errors import Usage
from .git import Git
from .lock import Lock, load_lock
from .overlay import blob_id
from .pins import Base
from .report import Ui

UNAPPLIED, APPLIED, MODIFIED, PARTIAL, WRONG_BASE = "unapplied", "applied", "modified", "partial", "wrong base"


@dataclass(frozen=True)
class State:
    """`level`: exact (whole tree as locked) or touched (each path the stack touches). `next_step`: the command to run."""

    kind: str
    base: Base | None
    level: str | None
    detail: str
    next_step: str


def command(name: str, target: pathlib.Path, *more: str) -> str:
    """A command line of this tool, ready to paste."""
    return " ".join(["python apply.py", name, *more, shlex.quote(str(target))])


def blobs_on_disk(root: pathlib.Path, paths: list[str]) -> dict[str, str]:
    """`path -> "<mode> <blob id>"` of files below a plain directory."""
    found = {}
    for path in paths:
        file = root / path
        if file.is_file() and not file.is_symlink():
            found[path] = f"{'100755' if os.access(file, os.X_OK) else '100644'} {blob_id(file.read_bytes())}"
    return found


def inspect(target: pathlib.Path, bases: list[Base], ui: Ui) -> State:
    """The state of `target`, against the bases whose locks exist. Raises Usage if it is no directory."""
    if not target.is_dir():
        raise Usage(f"{target} is not a directory", f"python apply.py apply --dest {shlex.quote(str(target))}")
    locks = [(base, load_lock(base.folder)) for base in bases if (base.folder / "lock.json").exists()]
    if not locks:
        raise Usage(f"no base has a lock.json: {', '.join(str(b.folder) for b in bases)}", "write one with `apply.py export DIR --base BASE`")
    if (target / ".git").is_dir() or (target / ".git").is_file():
        git = Git(target, git_dir=target / ".git", work_tree=target, log=ui.git)  # never the repository above
        if git.resolve("HEAD^{commit}"):
            return _inspect_git(git, target, locks)
    return _inspect_directory(target, locks)


def _compare(lock: Lock, found: dict[str, str]) -> tuple[list[str], list[str]]:
    """(paths that are not as upstream has them, paths that are not as the stack leaves them)."""
    not_before = [p for p, (before, _) in lock.touched.items() if found.get(p) != before]
    not_after = [p for p, (_, after) in lock.touched.items() if found.get(p) != after]
    return not_before, not_after


def _judge(base: Base, lock: Lock, tree: str | None, found: dict[str, str], target: pathlib.Path) -> State | None:
    """The state if `found` is upstream, the whole stack, or a prefix of it; None otherwise."""
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


def _inspect_git(git: Git, target: pathlib.Path, locks: list[tuple[Base, Lock]]) -> State:
    tree = git.text("rev-parse", "HEAD^{tree}")
    dirty = place.dirty_paths(git)
    founds = [git.blobs(tree, sorted(lock.touched)) for _, lock in locks]
    state = next((s for (base, lock), found in zip(locks, founds, strict=True) if (s := _judge(base, lock, tree, found, target))), None)
    laid = git.resolve(f"{place.APPLIED_REF}^{{tree}}")
    if state and state.kind == APPLIED and state.level == "touched" and laid not in (None, tree):
        state = None  # commits on files that no patch touches are commits that patches/ does not have, too
    if state is None or dirty:
        recorded = git.resolve(f"{place.BASE_REF}^{{tree}}")
        base = state.base if state else None
        if base is None and recorded:
            before = [git.blobs(recorded, sorted(lock.touched)) for _, lock in locks]
            base = next((b for (b, lock), found in zip(locks, before, strict=True) if recorded == lock.base_tree or (lock.touched and not _compare(lock, found)[0])), None)
        if base is None:
            return _wrong(locks, founds)
        if dirty:
            what = f"uncommitted changes in {len(dirty)} files ({', '.join(dirty[:4])}{', ...' if len(dirty) > 4 else ''})"
            then = "commit them with a Topic: trailer (or as a fixup), then " + command("export", target)
        elif git.resolve("HEAD") == git.resolve(place.APPLIED_REF):
            return State(MODIFIED, base, None, "an older or other version of the stack is applied", command("apply", target, "--ref", base.tag, "--dest"))
        else:
            what, then = "commits that patches/ does not have", command("export", target)
        return State(MODIFIED, base, None, what, then)
    return state


def installed_part(lock: Lock) -> Lock:
    """What of a lock an installed package can show: the files below vllm/."""
    return replace(lock, touched={path: blobs for path, blobs in lock.touched.items() if path.startswith("vllm/")})


def _inspect_directory(target: pathlib.Path, locks: list[tuple[Base, Lock]]) -> State:
    if not (target / "tests").is_dir():  # site-packages with a wheel, not a source tree
        locks = [(base, installed_part(lock)) for base, lock in locks]
    founds = [blobs_on_disk(target, sorted(lock.touched)) for _, lock in locks]
    state = next((s for (base, lock), found in zip(locks, founds, strict=True) if (s := _judge(base, lock, None, found, target))), None)
    if state is None:
        return _wrong(locks, founds)
    if state.kind == UNAPPLIED:
        return State(state.kind, state.base, state.level, state.detail + " (a plain directory)", f"python apply.py apply --ref {state.base.tag} --source {shlex.quote(str(target))} --dest NEW_DIRECTORY")
    return state
