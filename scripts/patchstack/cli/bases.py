# SPDX-License-Identifier: Apache-2.0
"""apply.py bases"""
from ..errors import OK
from ..pins import load_bases
from ..report import table
from ..series import load_series

HELP = """\
Print the table of topics by base: patched, upstream (since when, by which pull request) or n/a (why).
"""


def configure(parser) -> None:
    pass


def run(args, ui) -> int:
    bases = sorted(load_bases(), key=lambda b: b.default)
    series = {b.tag: load_series(b.folder) for b in bases}
    topics = list(dict.fromkeys(t for b in bases for t in series[b.tag].states))

    def cell(tag: str, topic: str) -> str:
        found = series[tag].states.get(topic)
        if found is None:
            return "not in this stack"
        return found.state + (f": {found.detail}" if found.state == "n/a" else f" {found.detail}" if found.detail else "")

    ui.result({
        "bases": [{"tag": b.tag, "version": b.version, "commit": b.commit, "sdist_sha256": b.sdist_sha256, "default": b.default} for b in bases],
        "topics": {t: {b.tag: {"state": s.state, "detail": s.detail} if (s := series[b.tag].states.get(t)) else None for b in bases} for t in topics},
    })  # fmt: skip
    ui.say(table([[t, *(cell(b.tag, t) for b in bases)] for t in topics], ["topic", *(f"{b.tag}{' (default)' if b.default else ''}" for b in bases)]))
    return OK
