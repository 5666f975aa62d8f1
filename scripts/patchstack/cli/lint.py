# SPDX-License-Identifier: Apache-2.0
"""apply.py lint"""
from .. import lint
from ..errors import FINDINGS, OK
from ..pins import ROOT, load_bases

HELP = """\
Check the files under patches/ and vllm_overlay/, without touching a tree.

Series and directory agree; patches have git's canonical form (compared with git's own output where the base is in the
cache) and all trailers; `Requires:` stands above, `Tests:` exist; paths stay below the tree, no symlink, rename or binary change; no
conflict marker; new files name their licence; every overlay file belongs to a base; the lock is fresh. Findings are printed
as `path:line: why`; exit code 1 if there is one.
"""


def configure(parser) -> None:
    pass


def run(args, ui) -> int:
    bases = load_bases()
    findings, notes = lint.lint(ROOT, bases, ui)
    ui.result({"findings": [{"path": p, "line": n, "why": w} for p, n, w in findings], "notes": notes})
    for path, line, why in findings:
        ui.say(f"{path}:{line}: {why}")
    for note in notes:
        ui.note(f"note: {note}")
    if findings:
        ui.say(ui.paint(f"{len(findings)} findings", "red"))
        return FINDINGS
    ui.say(f"{ui.paint('clean', 'green')}: {', '.join(b.tag for b in bases)}")
    return OK
