# SPDX-License-Identifier: Apache-2.0
"""Carry the stack to another release and write patches/<release>/.

Every patch is merged 3-way onto the release in build/rebase-<release>; recorded resolutions (rerere/) are used again. It
stops, with exit code 4, only where a human has to decide: a conflict, or a patch of which nothing is left because upstream
has it. Then resolve and `--continue`, leave the topic out with `--skip` (a patch that upstream took becomes an `upstream`
line of the series; nothing is dropped silently), or `--abort`. At the end the round trip is proven, patches/<release>/
appears in one step, and the range-diff of the old and the new stack is shown.
"""
from .. import rebase, verify
from ..errors import FINDINGS, OK, Usage
from ..pins import ROOT, find_base, load_bases
from ..releases import find_release
from ..upstream import fetch


def configure(parser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="REF", help="start: the release to carry the stack to (v0.32.0, or `latest`)")
    what.add_argument("--continue", dest="go_on", action="store_true", help="go on after you resolved and `git add`ed")
    what.add_argument("--skip", action="store_true", help="leave the present topic out, then go on")
    what.add_argument("--abort", action="store_true", help="give up; nothing is written under patches/")
    parser.add_argument("--base", default=None, help="with --to: the stack to carry (default: the default base's)")
    parser.add_argument("--dry-run", action="store_true", help="with --to: say what would stop, as `drift` does")


def run(args, ui) -> int:
    if args.dry_run:
        if not args.to:
            raise Usage("--dry-run goes with --to")
        from . import drift

        args.ref, args.html, args.history = [args.to], None, None
        return drift.run(args, ui)
    if args.to:
        base = find_base(args.base, load_bases())
        old = fetch(base, "auto", ui)
        work = rebase.start(ROOT, base, find_release(args.to, base, ui), old, ui)
    else:
        work = rebase.find(ROOT, ui)
        base = find_base(work.from_tag, load_bases())
    if args.abort:
        rebase.abort(work)
        ui.result({"state": "aborted", "to": work.to.tag})
        ui.say(f"the rebase to {work.to.tag} is forgotten; nothing was written under patches/")
        return OK
    if args.skip:
        topic = rebase.current_topic(work)
        drifts = rebase.propose(work, base, fetch(base, "auto", ui), find_release(work.to.tag, base, ui).upstream, ui)
        work, line = rebase.skip(work, base, drifts.get(topic), ui)
        ui.say(f"skipped {topic}; the series will say: {line}")
        for signal in drifts[topic].signals if topic in drifts else []:
            ui.say(f"  {signal}")
    rebase.advance(work, ROOT, ui)
    difference = rebase.finish(work, base, ROOT, ui)
    code, checked = _verify(work, ui)
    ui.result({"state": "carried", "from": base.tag, "to": work.to.tag, "topics": rebase.topics_done(work), "skipped": work.skipped, "range_diff": difference, "verify": checked})
    ui.say(difference)
    ui.say(f"wrote {work.to.folder}\nnext: python apply.py apply --ref {work.to.tag} --verify, and the tests; the work tree stays at {work.tree} until you remove it")
    rebase.done(work)
    return code


def _verify(work, ui) -> tuple[int, list[str]]:
    """Names and calls that do not fit the new release, though every patch was carried."""
    found = verify.verify(work.tree, [work.to], True, ui).findings
    for finding in found:
        ui.say(str(finding))
    return (FINDINGS if found else OK), [str(f) for f in found]
