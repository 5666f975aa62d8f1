# SPDX-License-Identifier: Apache-2.0
"""apply.py drift"""
import pathlib

from .. import stack
from ..drift import Drift, analyse
from ..drift_page import page
from ..errors import FINDINGS, OK
from ..history import History
from ..lock import write_atomic
from ..pins import find_base, load_bases
from ..releases import find_release
from ..report import table
from ..upstream import fetch

HELP = """\
Report how the whole stack stands on other releases, changing nothing but the cache.

For each patch: clean, offset (hunks moved), 3-way (git merged it), already-upstream (with the signals that say so), conflict
(each place with ours, base and theirs) or missing file. Then overlay files that upstream has now, and names and signatures
that our lines use and the release does not have. Exit code 1 if something needs a human. Give --ref several times for a
matrix; --html writes one self-contained page.
"""


def configure(parser) -> None:
    parser.add_argument("--ref", action="append", required=True, help="a release (v0.32.0, or `latest`), or the path of a clone, an sdist or a plain directory; may be given several times")
    parser.add_argument("--base", default=None, help="the stack to carry (default: the default base's)")
    parser.add_argument("--html", type=pathlib.Path, default=None, metavar="FILE", help="write a page that needs no network")
    parser.add_argument("--history", type=pathlib.Path, default=None, metavar="CARVED", help="a repository made by `carve`: name the upstream commit behind each conflict, and look for our patches in it")


def run(args, ui) -> int:
    base = find_base(args.base, load_bases())
    files = stack.read_stack(base)
    old = fetch(base, "auto", ui)
    history = History(args.history, ui) if args.history else None
    drifts, seen = [], []
    for ref in args.ref:
        release = find_release(ref, base, ui)
        if any(d.ref == release.name and u == release.upstream for d, u in zip(drifts, seen, strict=True)):
            continue  # `latest` may be one that was named too
        seen.append(release.upstream)
        found = analyse(files, old, release.upstream, release.name, release.version, history.mover(base, release) if history else None, ui)
        if history:
            history.add_signals(found, files, base, release)
        drifts.append(found)
    if args.html:
        write_atomic(args.html.expanduser().absolute(), page(drifts).encode("utf-8", "replace"))
    ui.result({"base": base.tag, "drifts": [d.payload() for d in drifts]})
    ui.say(table([[p.topic, *(d.patches[i].state for d in drifts)] for i, p in enumerate(drifts[0].patches)], [f"on {base.tag}", *(d.ref for d in drifts)]) if drifts[0].patches else f"{base.tag} has no patch")
    for drift in drifts:
        _say_details(drift, ui)
    if args.html:
        ui.say(f"the page is at {args.html}")
    return FINDINGS if any(d.needs_work for d in drifts) else OK


def _say_details(drift: Drift, ui) -> None:
    for patch in drift.patches:
        lines = [f"  {line}" for line in [*patch.offsets, *patch.signals, *([patch.note] if patch.note else [])]]
        for region in patch.regions:
            lines.append(f"  {region.path}:{region.line}: conflict{f', moved by {region.moved_by}' if region.moved_by else ''}")
            lines += [f"    {label:6} | {line}" for label, part in (("ours", region.ours), ("base", region.base), ("theirs", region.theirs)) for line in part]
        if lines:
            ui.say(f"\n{drift.ref}: {patch.topic}: {patch.state}")
            for line in lines:
                ui.say(line)
    for path in drift.overlay_collisions:
        ui.say(f"\n{drift.ref}: upstream has {path} now, which the overlay would replace")
    for finding in drift.findings:
        ui.say(f"\n{drift.ref}: {finding}")
