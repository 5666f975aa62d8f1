# SPDX-License-Identifier: Apache-2.0
"""apply.py unapply"""
import contextlib
import os
import pathlib

from .. import foreign, gitstate, inplace, state, worktree
from ..errors import OK, Refused
from ..gitstate import APPLIED_REF, BASE_REF
from ..pins import load_bases

HELP = """\
Put a patched tree back to exactly upstream.

Only the stack's own files are changed, one by one, behind a journal: after a kill `status` says `interrupted`, and the next run
finishes or takes back. Refused while the tree has changes that patches/ does not have: `export` or discard them first.
Untracked files stay.
"""


def configure(parser) -> None:
    parser.add_argument("dir", type=pathlib.Path, help="a tree that `apply` made or patched")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, change nothing")


def run(args, ui) -> int:
    bases = load_bases()
    locks = state.known_locks(bases)
    target = pathlib.Path(os.path.realpath(args.dir.expanduser()))
    payload = {"dir": str(target), "base": None, "dry_run": args.dry_run}
    there = foreign.find(target) if (target / ".git").exists() else None
    left = inplace.interrupted(there, ui.note) if there else None
    if left and args.dry_run:
        raise Refused(f"`{left.command}` in {target} was interrupted", "run it without --dry-run: that is finished or taken back first")
    if there is None:
        if not _already_upstream(ui, bases, target, payload):
            inplace.place_of(target)  # says what is wrong
        return OK
    with foreign.opened(there, ui.git) as git:
        if not left and any(state.head_holds(git, lock, 0) for _, lock in locks) and _already_upstream(ui, bases, target, payload, there):
            return OK
        inplace.refuse_linked(there)
        with contextlib.nullcontext() if args.dry_run else inplace.held(there, git, ui) as desk:
            seen = worktree.glance(target, git, {path for _, lock in locks for path in lock.touched})
            records = gitstate.records_of(git)
            applied, base_commit = records.get(APPLIED_REF), records.get(BASE_REF)
            known = seen is not None and applied is not None and base_commit is not None
            if known:
                found = state.judge(git, target, seen, locks)
                payload["base"] = found.base.tag if found.base else None
                inplace.refuse_dirty(target, seen)
                if seen.head != applied:
                    count = git.text("rev-list", "--count", f"{applied}..HEAD")
                    raise Refused(f"{target} has commits that patches/ does not have ({count} on top of what `apply` made, or rewritten ones)",
                                  f"{state.command('export', target)} keeps them; `git -C {target} reset --keep {APPLIED_REF}` drops them")  # fmt: skip
                if desk:
                    inplace.unapply(there, git, desk, seen, base_commit, ui)
        if not known:
            if left and _already_upstream(ui, bases, target, payload, there):  # what had been interrupted is done
                return OK
            raise Refused(f"{target} has no record of what `apply` did (refs {BASE_REF}, {APPLIED_REF})", "check out the upstream commit with git, or apply to a new --dest")
    ui.result(payload | {"state": "would unapply" if args.dry_run else "unapplied", "commit": base_commit})
    ui.say(f"{'would put' if args.dry_run else 'put'} {target} back to upstream ({base_commit[:12]})")
    return OK


def _already_upstream(ui, bases, target, payload, there=None) -> bool:
    """Whether the tree is upstream's already, by every file that it holds; says so."""
    found = state.inspect(target, bases, ui)
    if found.kind != state.UNAPPLIED:
        return False
    if there is not None and not payload["dry_run"]:
        inplace.tidy(there, ui.note)
    ui.result(payload | {"base": found.base.tag, "state": "already upstream"})
    ui.say(f"already upstream: {found.detail} at {target}")
    return True
