# SPDX-License-Identifier: Apache-2.0
"""apply.py verify"""
import pathlib

from .. import verify
from ..errors import FINDINGS, OK
from ..pins import Base, load_bases
from ..report import Ui

HELP = """\
Check that a tree is what the lock says and that our lines fit the tree they landed in.

Two levels pass: *exact* (the whole tree is the locked one) and *touched* (every path that the stack touches is). Then every
touched file must compile; every name that our lines and the overlay use from vLLM must exist, also inside functions; every
call we add must bind to the signature it calls; every VLLM_* variable we read must be registered in vllm/envs.py. Findings
are printed as `path:line: why`; exit code 1 if there is one.
"""


def configure(parser) -> None:
    parser.add_argument("dir", type=pathlib.Path, help="a tree that `apply` made, a checkout, or a plain directory")
    parser.add_argument("--each", action="store_true", help="check also after each prefix of the series")


def run(args, ui) -> int:
    code, payload = check(args.dir.expanduser().absolute(), load_bases(), args.each, ui)
    ui.result(payload)
    return code


def check(target: pathlib.Path, bases: list[Base], each: bool, ui: Ui) -> tuple[int, dict]:
    """Verify `target` and say what was found: (exit code, JSON payload). `apply --verify` shares it."""
    done = verify.verify(target, bases, each, ui)
    for finding in done.findings:
        ui.say(str(finding))
    if done.findings:
        ui.say(ui.paint(f"{len(done.findings)} findings in {target} ({done.base.tag})", "red"))
    else:
        ui.say(f"{ui.paint('verified', 'green')}: {target} is vLLM {done.base.tag} with the stack ({done.level}); {', '.join(done.checked)}")
    payload = {"dir": str(target), "base": done.base.tag, "level": done.level, "checked": list(done.checked),
               "findings": [{"path": f.path, "line": f.line, "why": f.why} for f in done.findings]}  # fmt: skip
    return FINDINGS if done.findings else OK, payload
