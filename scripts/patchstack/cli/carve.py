# SPDX-License-Identifier: Apache-2.0
"""apply.py carve"""
import pathlib

from .. import carve
from ..errors import OK
from ..pins import ROOT, load_bases

HELP = """\
Carve a small repository with upstream's real history of only the touched paths out of a clone.

Blob ids stay what they are; filter-repo/commit-map in it keeps upstream's commit names. `drift --history DIR` then names the
upstream commit behind each conflict. The clone is only read. Needs the package git-filter-repo.
"""


def configure(parser) -> None:
    parser.add_argument("clone", type=pathlib.Path, help="a full clone of vLLM")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="the repository to make (default: build/carved.git)")
    parser.add_argument("--dry-run", action="store_true", help="list the paths, make nothing")


def run(args, ui) -> int:
    bases = load_bases()
    out = (args.out or ROOT / "build" / "carved.git").expanduser().absolute()
    if args.dry_run:
        paths = carve.paths_of(bases)
        ui.result({"paths": paths, "dry_run": True})
        ui.say("\n".join(paths))
        return OK
    done = carve.carve(args.clone.expanduser().absolute(), out, bases, ui)
    ui.result({"out": str(out), **done})
    ui.say(f"{out} has {done['commits_after']} of {done['commits_before']} commits: the history of {done['paths']} paths\nnext: python apply.py drift --ref latest --history {out}")
    return OK
