# SPDX-License-Identifier: Apache-2.0
"""Fetch a pinned vLLM release and put the patched tree in place.

The commits are built and compared with the lock before anything is written; the tree then appears at --dest in one step.
If --dest is upstream's tree already (a clone at the pin, or a tree that `unapply` left), it is swapped for the patched one;
untracked files stay. If it is patched already, nothing happens.
"""
import pathlib

from .. import place, stack, state
from ..errors import OK, Refused
from ..files import clear_scratch
from ..git import Git
from ..lock import load_lock
from ..pins import ROOT, find_base, load_bases
from ..upstream import fetch
from . import verify


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
    target = args.dest.expanduser().absolute() if args.dest else ROOT / "build" / f"vllm-{base.tag}"
    payload = {"base": base.tag, "dest": str(target), "dry_run": args.dry_run, "patches": list(files.series.patches), "overlay": sorted(files.overlay)}
    if place.is_fresh(target):
        _apply_fresh(args, ui, base, files, lock, target, payload)
    elif lock is None:
        raise Refused(f"{target} exists, and {base.tag} has no lock.json to compare it with", f"python apply.py apply --ref {base.tag} --dest NEW_DIRECTORY")
    else:
        _apply_in_place(args, ui, bases, base, files, lock, target, payload)
    code = OK
    if args.verify and lock and not args.dry_run:
        code, payload["verify"] = verify.check(target, bases, False, ui)
    elif lock and not args.dry_run:
        ui.say(f"next: {state.command('verify', target)}")
    ui.result(payload)
    return code


def _apply_fresh(args, ui, base, files, lock, target, payload) -> None:
    upstream = fetch(base, args.source, ui)

    def make(git: Git) -> stack.Built:
        level = stack.check_base(git, base, lock, upstream.commit, f"the {upstream.kind} source") if lock else "not yet locked"
        built = stack.build(git, upstream.commit, files.patches, files.overlay, ui)
        if lock:
            stack.check_result(git, lock, built, level)
        payload.update(level=level, source=upstream.kind, commit=built.commit, tree=built.tree)
        return built

    if args.dry_run:
        with Git.scratch(upstream.git_dir, log=ui.git) as git:
            make(git)
    else:
        place.create(target, base, upstream, make, ui)
    _say_applied(args, ui, base, files, target, payload)


def _apply_in_place(args, ui, bases, base, files, lock, target, payload) -> None:
    found = state.inspect(target, bases, ui)
    if found.kind == state.WRONG_BASE or (found.base and found.base.tag != base.tag):
        what = f"{found.base.tag} ({found.kind})" if found.base else found.detail
        raise Refused(f"{target} is not {base.tag}: {what}", f"choose another --dest; or {found.next_step}")
    if found.kind == state.APPLIED:
        if not args.dry_run:
            clear_scratch(target.resolve(), ui.note)
        payload.update(state="already applied", level=found.level)
        ui.say(f"already applied: {found.detail} at {target}")
        return
    git = place.repository_of(target, ui)
    place.refuse_dirty(git, target, {path for path, (before, _) in lock.touched.items() if before is None})
    head = git.text("rev-parse", "HEAD")
    if found.kind == state.UNAPPLIED:
        base_commit = head
    elif head == git.resolve(place.APPLIED_REF):  # an older version of the stack, untouched since
        base_commit = git.text("rev-parse", place.BASE_REF)
    else:
        raise Refused(f"{target} is {found.kind}: {found.detail}", found.next_step)
    level = stack.check_base(git, base, lock, base_commit, str(target))
    with Git.scratch(git.git_dir, log=ui.git) as scratch:
        built = stack.build(scratch, base_commit, files.patches, files.overlay, ui)
        stack.check_result(scratch, lock, built, level)

        def change(copy: Git) -> None:
            copy.take_objects(scratch.git_dir)
            place.point_branch(copy, base, built)

        if not args.dry_run:
            place.replace(target, change, ui)
    payload.update(level=level, source="in place", commit=built.commit, tree=built.tree)
    _say_applied(args, ui, base, files, target, payload)


def _say_applied(args, ui, base, files, target, payload) -> None:
    payload["state"] = "would apply" if args.dry_run else "applied"
    ui.say(f"{payload['state']} {len(files.patches)} patches and {len(files.overlay)} overlay files on vLLM {base.tag} ({payload['source']} source, {payload['level']} base)")
    ui.say(f"the tree {'would be' if args.dry_run else 'is'} at {target}")
