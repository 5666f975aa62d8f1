# SPDX-License-Identifier: Apache-2.0
"""apply.py export"""
import os
import pathlib

from .. import export, journal, state
from ..errors import OK
from ..pins import ROOT, load_bases

HELP = """\
Turn the edited commits of a tree back into patches/<base>/*.patch, series and lock.json, and vllm_overlay/ files.

Each commit on top of the base is one patch and carries a `Topic:` trailer. The exported patches are applied again before
anything is written, and must give HEAD's tree; the files are then changed one by one behind a journal, so that a killed run is
finished or taken back by the next. A patch that did not change keeps its bytes. A topic that has no commit any
more is dropped only with --allow-drop.
"""


def configure(parser) -> None:
    parser.add_argument("dir", type=pathlib.Path, help="a tree that `apply` made, with your commits")
    parser.add_argument("--base", default=None, help="the base, where the tree was not made by `apply` (first patches of a new base)")
    parser.add_argument("--allow-drop", action="store_true", help="let patches without a commit leave the series")
    parser.add_argument("--dry-run", action="store_true", help="prove the export and say what would change, write nothing")


def run(args, ui) -> int:
    target = pathlib.Path(os.path.realpath(args.dir.expanduser()))
    if not args.dry_run:
        export.finish_tree(target, ui)
    base = export.choose_base(target, args.base, load_bases(), ui)
    known = export.fingerprint(base)
    planned = export.plan(target, base, args.allow_drop, ui)
    anything = planned.anything
    if anything and not args.dry_run:
        with export.held(ROOT / "patches", ui.note) as desk:
            if export.fingerprint(base) != known:  # another export was faster
                planned = export.plan(target, base, args.allow_drop, ui)
            export.write(planned, desk)
    if not args.dry_run:
        journal.tidy(ROOT / "patches", export.DESK, ui.note)
        export.record(planned, target, ui)
    payload = {"dir": str(target), "base": base.tag, "dry_run": args.dry_run, "changed": list(planned.changed), "new": list(planned.new),
               "dropped": list(planned.dropped), "overlay_changed": sorted(planned.overlay_changed), "written": anything and not args.dry_run}  # fmt: skip
    ui.result(payload)
    if not anything:
        ui.say(f"nothing to export: patches/{base.tag} already says what {target} holds")
        return OK
    for what, names in (("changed", planned.changed), ("new", planned.new), ("dropped", planned.dropped), ("overlay", sorted(planned.overlay_changed))):
        for name in names:
            ui.say(f"{what}: {name}")
    ui.say(f"{'would write' if args.dry_run else 'wrote'} {base.folder} ({len(planned.patches)} patches, lock.json); the round trip gives the same tree\nnext: {state.command('verify', target)} && python apply.py lint")
    return OK
