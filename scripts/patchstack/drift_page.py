# SPDX-License-Identifier: Apache-2.0
"""The drift report as one HTML page without outside resources: a matrix, then every conflict with ours, base and theirs side by side."""
import html
import os

from .drift import CONFLICT, MISSING, UPSTREAM, Drift, PatchDrift, Region

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the page loads nothing and runs nothing
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #1a7f37; --warn: #9a6700; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
.scroll { overflow-x: auto; } .clean, .offset, .three-way { color: var(--good); } .already-upstream { color: var(--warn); } .conflict, .missing-file { color: var(--bad); font-weight: 600; }
.sides { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: .5rem; } @media (max-width: 900px) { .sides { grid-template-columns: minmax(0, 1fr); } }
.side { border: 1px solid var(--line); border-radius: .3rem; min-width: 0; } .side h4 { margin: 0; padding: .2rem .6rem; border-bottom: 1px solid var(--line); font-size: .85rem; }
pre { margin: 0; padding: .5rem .6rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.45 ui-monospace, monospace; min-height: 1.4em; } code { font: .87em ui-monospace, monospace; overflow-wrap: anywhere; }
h3 { margin: 1.2rem 0 .3rem; font-size: 1.05rem; } h3 code { font-weight: 600; } h2 { border-bottom: 1px solid var(--line); } p { margin: .4rem 0; } .note { opacity: .8; } .empty { opacity: .6; font-style: italic; }
"""


def page(drifts: list[Drift]) -> str:
    """The whole page. Raises ValueError for an empty report."""
    if not drifts:
        raise ValueError("no release to report on")
    base = drifts[0].base
    parts = [f"<h1>Drift of the {_text(base)} stack</h1>", _matrix(drifts)]
    parts += [_release(d, number) for number, d in enumerate(drifts)]
    title = f"Drift of the {base} stack"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n' + "\n".join(parts) + "\n</body></html>\n")  # fmt: skip


def _text(text: object) -> str:
    return html.escape(str(text))


def _css(state: str) -> str:
    return "three-way" if state == "3-way" else state.replace(" ", "-")


def _anchor(number: int, patch: PatchDrift) -> str:
    """Of a patch on the release with this number: two releases may have the same name."""
    return html.escape(f"{number}-{patch.topic}", quote=True)


def _matrix(drifts: list[Drift]) -> str:
    head = "".join(f"<th>{_text(d.ref)}</th>" for d in drifts)
    rows = []
    for i, patch in enumerate(drifts[0].patches):
        cells = "".join(f'<td><a class="{_css(d.patches[i].state)}" href="#{_anchor(n, d.patches[i])}">{_text(d.patches[i].state)}</a>{_mark(d.patches[i])}</td>' for n, d in enumerate(drifts))
        rows.append(f"<tr><th><code>{_text(patch.topic)}</code></th>{cells}</tr>")
    counts = "".join(f"<td>{len(d.findings)}</td>" for d in drifts)
    collisions = "".join(f"<td>{len(d.overlay_collisions)}</td>" for d in drifts)
    return (f'<div class="scroll"><table><tr><th>topic</th>{head}</tr>{"".join(rows)}'
            f"<tr><th>names and calls that do not fit</th>{counts}</tr><tr><th>overlay files that upstream has</th>{collisions}</tr></table></div>")  # fmt: skip


def _mark(patch: PatchDrift) -> str:
    """A patch that is still carried, but of which something says that it may retire."""
    return " (retire?)" if patch.signals and patch.state != UPSTREAM else ""


def _release(drift: Drift, number: int) -> str:
    parts = [f"<h2>{_text(drift.ref)}</h2>"]
    for patch in drift.patches:
        parts.append(f'<h3 id="{_anchor(number, patch)}"><code>{_text(patch.topic)}</code>: <span class="{_css(patch.state)}">{_text(patch.state)}</span></h3>')
        lines = [*patch.signals, *([patch.note] if patch.note else [])]
        if patch.offsets:
            lines.append(f"{len(patch.offsets)} hunk{'s' if len(patch.offsets) > 1 else ''} moved")
        parts += [f'<p class="note">{_text(line)}</p>' for line in lines]
        parts += [_region(r) for r in patch.regions]
        if patch.state in (CONFLICT, MISSING) and not patch.regions and not lines:
            parts.append('<p class="note">no detail</p>')
    for path in drift.overlay_collisions:
        parts.append(f"<p>Upstream has <code>{_text(path)}</code> now, which the overlay would replace.</p>")
    if drift.findings:
        parts.append("<h3>Names and calls that do not fit</h3><ul>" + "".join(f"<li><code>{_text(f)}</code></li>" for f in drift.findings) + "</ul>")
    return "\n".join(parts)


def _region(region: Region) -> str:
    moved = f'<p class="note">moved by upstream {_text(region.moved_by)}</p>' if region.moved_by else ""
    labels = ("ours (the stack)", "base (the old release)", "theirs (the new release)")
    empty = '<span class="empty">nothing here</span>'
    shown = "".join(f'<div class="side"><h4>{label}</h4><pre>{_text(text) or empty}</pre></div>' for label, text in zip(labels, _dedented(region), strict=True))
    return f'<p><code>{_text(region.path)}:{region.line}</code></p>{moved}<div class="sides">{shown}</div>'


def _dedented(region: Region) -> list[str]:
    """Ours, base and theirs without the indentation that all of their lines share: columns are narrow."""
    sides = (region.ours, region.base, region.theirs)
    margin = os.path.commonprefix([line[: len(line) - len(line.lstrip())] for lines in sides for line in lines if line.strip()])
    return ["\n".join(line.removeprefix(margin) if line.strip() else "" for line in lines) for lines in sides]
