# SPDX-License-Identifier: Apache-2.0
"""Put a patched tree back to exactly upstream.

Refused while the tree has changes that patches/ does not have: `export` or discard them first. Untracked files stay.
"""
import pathlib

from .. import place, state
from ..errors import OK, Refused
from ..files import clear_scratch
from ..pins import load_bases


def configure(parser) -> None:
    parser.add_argument("dir", type=pathlib.Path, help="a tree that `apply` made or patched")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, change nothing")


def run(args, ui) -> int:
    target = args.dir.expanduser().absolute()
    found = state.inspect(target, load_bases(), ui)
    payload = {"dir": str(target), "base": found.base.tag if found.base else None, "dry_run": args.dry_run}
    if found.kind == state.UNAPPLIED:
        if not args.dry_run:
            clear_scratch(target.resolve(), ui.note)
        ui.result(payload | {"state": "already upstream"})
        ui.say(f"already upstream: {found.detail} at {target}")
        return OK
    git = place.repository_of(target, ui)
    applied, base_commit, head = git.resolve(place.APPLIED_REF), git.resolve(f"{place.BASE_REF}^{{commit}}"), git.text("rev-parse", "HEAD")
    if applied is None or base_commit is None:
        raise Refused(f"{target} has no record of what `apply` did (refs {place.BASE_REF}, {place.APPLIED_REF})", "check out the upstream commit with git, or apply to a new --dest")
    place.refuse_dirty(git, target, set())
    if head != applied:
        count = git.text("rev-list", "--count", f"{applied}..HEAD")
        raise Refused(f"{target} has commits that patches/ does not have ({count} on top of what `apply` made, or rewritten ones)",
                      f"{state.command('export', target)} keeps them; `git -C {target} reset --keep {place.APPLIED_REF}` drops them")  # fmt: skip
    if not args.dry_run:
        place.replace(target, place.point_back, ui)
    ui.result(payload | {"state": "would unapply" if args.dry_run else "unapplied", "commit": base_commit})
    ui.say(f"{'would put' if args.dry_run else 'put'} {target} back to upstream ({base_commit[:12]})")
    return OK
