# SPDX-License-Identifier: Apache-2.0
"""apply.py rebase"""
from .. import files, rebase, stack, verify
from ..errors import FINDINGS, OK, Refused, Usage
from ..pins import ROOT, Base, find_base, load_bases
from ..releases import find_release
from ..upstream import fetch

HELP = """\
Carry the stack to another release and write patches/<release>/.

Every patch is merged 3-way onto the release in build/rebase-<release>; recorded resolutions (rerere/) are used again. It
stops, with exit code 4, only where a human has to decide: a conflict, or a patch of which nothing is left because upstream
has it. Then resolve and `--continue`, leave the topic out with `--skip` (a patch that upstream took becomes an `upstream`
line of the series; nothing is dropped silently), or `--abort`. At the end the round trip is proven, patches/<release>/
appears in one step, and the range-diff of the old and the new stack is shown.
"""


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
        if running := rebase.in_progress(ROOT, ui):
            raise Refused(f"a rebase to {running[0].to.tag} is in progress at {running[0].tree}", "python apply.py rebase --continue, --skip or --abort")
        old = fetch(base, "auto", ui)
        rebase.start(ROOT, base, find_release(args.to, base, ui), old, ui)
    elif args.base:
        raise Usage("--base goes with --to")
    work = rebase.find(ROOT, ui)
    with files.locked(work.tree.parent, ui.note):
        work = rebase.find(ROOT, ui)  # another run may have gone on while this one waited
        if args.abort:
            rebase.abort(work)
            ui.result({"state": "aborted", "to": work.to.tag})
            ui.say(f"the rebase to {work.to.tag} is forgotten; nothing was written under patches/")
            return OK
        return _go_on(args, work, find_base(work.from_tag, load_bases()), ui)


def _go_on(args, work: rebase.Rebase, base: Base, ui) -> int:
    if args.skip:
        drift = None
        if work.stop and work.stop[1] == "conflict":
            drift = rebase.propose(work, base, fetch(base, "auto", ui), find_release(work.to.tag, base, ui).upstream, ui).get(work.stop[0])
        topic = work.stop[0] if work.stop else None
        work, line = rebase.skip(work, base, drift)
        ui.say(f"skipped {topic}; the series will say: {line}")
        for signal in drift.signals if drift else []:
            ui.say(f"  {signal}")
    work = rebase.advance(work, base, ROOT, ui)
    difference = rebase.finish(work, base, ROOT, ui)
    code, checked = _verify(work, ui)
    topics = [t for t in rebase.topics_done(work) if t != stack.OVERLAY_TOPIC]
    signs = {t: s for t, s in rebase.retirements(work, base).items() if t in topics}
    ui.result({"state": "carried", "from": base.tag, "to": work.to.tag, "topics": topics, "skipped": work.skipped, "retire": signs, "range_diff": difference, "verify": checked})
    ui.say(difference)
    for topic, lines in signs.items():
        ui.say(f"\n{topic} was carried, but it may be time to retire it: {'; '.join(lines)}")
    ui.say(f"\nwrote {work.to.folder}\nnext: python apply.py apply --ref {work.to.tag} --verify, and the tests; the work tree stays at {work.tree} until you remove it")
    rebase.done(work)
    return code


def _verify(work, ui) -> tuple[int, list[str]]:
    """Names and calls that do not fit the new release, though every patch was carried."""
    found = verify.verify(work.tree, [work.to], True, ui).findings
    for finding in found:
        ui.say(str(finding))
    return (FINDINGS if found else OK), [str(f) for f in found]
