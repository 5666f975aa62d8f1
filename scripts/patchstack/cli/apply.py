# SPDX-License-Identifier: Apache-2.0
"""apply.py apply"""
import contextlib
import os
import pathlib

from .. import foreign, inplace, stack, state, worktree
from ..errors import OK, Refused
from ..files import is_fresh
from ..git import Git
from ..gitstate import APPLIED_REF, BASE_REF
from ..lock import load_lock
from ..pins import ROOT, find_base, load_bases

HELP = """\
Fetch a pinned vLLM release and put the patched tree in place.

The commits are built and compared with the lock before anything is written. A new --dest then appears in one step. If --dest is
upstream's tree already (a clone at the pin, or a tree that `unapply` left), its files are changed one by one, those of the stack
and no others, behind a journal: after a kill `status` says `interrupted`, and the next run finishes or takes back. If it is patched
already, nothing happens.
"""


def configure(parser) -> None:
    parser.add_argument("--ref", default=None, help="a pinned release: v0.33.0, 0.33.0, or its commit, full or abbreviated (default: the default base)")
    parser.add_argument("--dest", type=pathlib.Path, default=None, help="the directory to make, or upstream's tree to patch in place (default: build/vllm-TAG in this project)")
    parser.add_argument("--source", default="auto", help="auto (cache, then the package index, then git), pypi, git, a URL, or the path of a clone, an sdist or a plain directory; VLLM_REPO names a repository that auto and git prefer")
    parser.add_argument("--verify", action="store_true", help="then check the tree as `verify` does")
    parser.add_argument("--dry-run", action="store_true", help="build and check everything, write nothing but the cache")


def run(args, ui) -> int:
    bases = load_bases()
    base = find_base(args.ref, bases)
    files = stack.read_stack(base)
    # A new base starts with nothing to check: the tree to commit the first topics in.
    lock = load_lock(base.folder) if files.patches or files.overlay or (base.folder / "lock.json").exists() else None
    if lock:
        stack.check_inputs(files, lock)
    # Resolved once: a link to a directory that is empty or not there yet means that directory.
    target = pathlib.Path(os.path.realpath(args.dest.expanduser())) if args.dest else ROOT / "build" / f"vllm-{base.tag}"
    payload = {"base": base.tag, "dest": str(target), "dry_run": args.dry_run, "patches": list(files.series.patches), "overlay": sorted(files.overlay)}
    if not (is_fresh(target) and _apply_fresh(args, ui, base, files, lock, target, payload)):
        if lock is None:
            raise Refused(f"{target} exists, and {base.tag} has no lock.json to compare it with", f"python apply.py apply --ref {base.tag} --dest NEW_DIRECTORY")
        _apply_in_place(args, ui, bases, base, files, lock, target, payload)
    code = OK
    if args.verify and lock and not args.dry_run:
        from . import verify  # in place and without it, half of the time would go into what is not used

        code, payload["verify"] = verify.check(target, bases, False, ui)
    elif lock and not args.dry_run:
        ui.say(f"next: {state.command('verify', target)}")
    ui.result(payload)
    return code


def _apply_fresh(args, ui, base, files, lock, target, payload) -> bool:
    """False if the target was made by somebody else meanwhile."""
    from .. import place
    from ..upstream import fetch

    upstream = fetch(base, args.source, ui)

    def make(git: Git) -> stack.Built:
        level = stack.check_base(git, base, lock, upstream.commit, f"the {upstream.kind} source") if lock else "not yet locked"
        built = stack.build(git, upstream.commit, files.patches, files.overlay, ui)
        if lock:
            stack.check_result(lock, built, level)
        payload.update(level=level, source=upstream.kind, commit=built.commit, tree=built.tree)
        return built

    if args.dry_run:
        with Git.scratch(upstream.git_dir, log=ui.git) as git:
            make(git)
    elif place.create(target, base, upstream, make, ui) is None:
        return False
    _say_applied(args, ui, base, files, target, payload)
    return True


def _apply_in_place(args, ui, bases, base, files, lock, target, payload) -> None:
    there = inplace.place_of(target)
    inplace.refuse_linked(there)
    left = inplace.interrupted(there, ui.note)
    if left and args.dry_run:
        raise Refused(f"`{left.command}` in {target} was interrupted", "run it without --dry-run: that is finished or taken back first")
    with foreign.opened(there, ui.git) as git:
        if not left and _already_applied(ui, bases, base, lock, there, git, payload):
            return
        with contextlib.nullcontext() if args.dry_run else inplace.held(there, git, ui) as desk:
            seen = worktree.glance(target, git, lock.touched)
            found = state.judge(git, target, seen, state.known_locks(bases)) if seen else state.inspect(target, bases, ui)
            if found.kind == state.WRONG_BASE or (found.base and found.base.tag != base.tag):
                what = f"{found.base.tag} ({found.kind})" if found.base else found.detail
                raise Refused(f"{target} is not {base.tag}: {what}", f"choose another --dest; or {found.next_step}")
            if found.kind != state.APPLIED:
                _change(args, ui, base, files, lock, there, git, desk, found, payload)
                return
        if not _already_applied(ui, bases, base, lock, there, git, payload):  # what was interrupted, or another run, did it
            raise Refused(f"{target} changed just now", "run the same command again")


def _already_applied(ui, bases, base, lock, there, git, payload) -> bool:
    """Whether the tree is patched already, by every file that it holds; says so."""
    if not state.head_holds(git, lock, 1):
        return False
    found = state.inspect(there.top, bases, ui)
    if found.kind != state.APPLIED or found.base.tag != base.tag:
        return False
    if not payload["dry_run"]:
        inplace.tidy(there, ui.note)
    payload.update(state="already applied", level=found.level)
    ui.say(f"already applied: {found.detail} at {there.top}")
    return True


def _change(args, ui, base, files, lock, there, git, desk, found, payload) -> None:
    seen = found.seen
    inplace.refuse_dirty(there.top, seen, {path for path, (before, _) in lock.touched.items() if before is None})
    if found.kind == state.UNAPPLIED:
        base_commit = seen.head
    elif seen.head == git.resolve(APPLIED_REF):  # an older version of the stack, untouched since
        base_commit = git.text("rev-parse", BASE_REF)
    else:
        raise Refused(f"{there.top} is {found.kind}: {found.detail}", found.next_step)
    with Git.scratch(there.common_dir, log=ui.git) as scratch:
        level = stack.check_base(scratch, base, lock, base_commit, str(there.top))
        built = stack.build(scratch, base_commit, files.patches, files.overlay, ui)
        stack.check_result(lock, built, level)
        if desk:
            inplace.apply(there, git, desk, seen, base, built, scratch, ui)
    payload.update(level=level, source="in place", commit=built.commit, tree=built.tree)
    _say_applied(args, ui, base, files, there.top, payload)


def _say_applied(args, ui, base, files, target, payload) -> None:
    payload["state"] = "would apply" if args.dry_run else "applied"
    ui.say(f"{payload['state']} {len(files.patches)} patches and {len(files.overlay)} overlay files on vLLM {base.tag} ({payload['source']} source, {payload['level']} base)")
    ui.say(f"the tree {'would be' if args.dry_run else 'is'} at {target}")
