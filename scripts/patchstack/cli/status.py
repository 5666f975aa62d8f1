# SPDX-License-Identifier: Apache-2.0
"""apply.py status"""
import pathlib

from .. import state
from ..errors import FINDINGS, OK
from ..pins import load_bases

HELP = """\
Say what state a tree is in: unapplied, applied, modified, partial, wrong base or interrupted, and which command to run next.

Decided by content: every file is read, and nothing of the tree is run or changed. A git checkout, an sdist that was unpacked and
an installed wheel are all understood. `interrupted`: a run was killed while it changed the tree; the next one finishes or takes
back. Exit code 0 for unapplied and applied, 1 for the others.
"""


def configure(parser) -> None:
    parser.add_argument("dir", type=pathlib.Path, help="the tree to look at")


def run(args, ui) -> int:
    target = args.dir.expanduser().absolute()
    found = state.inspect(target, load_bases(), ui)
    good = found.kind in (state.APPLIED, state.UNAPPLIED)
    ui.result({"dir": str(target), "state": found.kind, "base": found.base.tag if found.base else None, "level": found.level, "detail": found.detail, "next": found.next_step})
    ui.say(f"{ui.paint(found.kind, 'green' if good else 'yellow')}: {found.detail}{f' ({found.level})' if found.level else ''}")
    ui.say(f"next: {found.next_step}")
    return OK if good else FINDINGS
