# SPDX-License-Identifier: Apache-2.0
"""Rules for what lies under patches/ and vllm_overlay/. Each check is short and yields (path, line, why)."""
import pathlib
import re
from collections.abc import Iterator

from . import stack, workspace
from .errors import Refused, StackError, Usage
from .export import render
from .git import Git
from .lock import load_lock
from .overlay import blob_id, list_overlay
from .patchfile import TRAILERS, UPSTREAM_STATUS, PatchFile, check_paths, read_patch, refuse_unseen
from .pins import Base
from .report import Ui
from .series import Series, load_series
from .upstream import cached

Report = tuple[str, int, str]

_HEADER = (re.compile(r"From 0{40} Mon Sep 17 00:00:00 2001"), re.compile(r"From: .+ <.+>"), re.compile(r"Date: \w{3}, \d{1,2} \w{3} \d{4} .+"), re.compile(r"Subject: \[PATCH\] .+"))
_SPDX = "SPDX-License-Identifier: Apache-2.0"
_CONFLICT = re.compile(r"(<<<<<<< |>>>>>>> |\|\|\|\|\|\|\| )")


def lint(root: pathlib.Path, bases: list[Base], ui: Ui) -> tuple[list[Report], list[str]]:
    """(findings, notes) for every base. Notes say what could not be checked."""
    findings: list[Report] = []
    notes: list[str] = []
    for base in bases:
        if said := stack.converted(base):
            return [_located(Usage(said), base.folder, root)], notes  # everything else would be found too
        try:
            series = load_series(base.folder)
        except Usage as e:
            findings.append(_located(e, base.folder / "series", root))
            continue
        findings += _relative(check_series(base, series), root)
        patches = []
        for topic in series.patches:
            try:
                patches.append(read_patch(base.folder / f"{topic}.patch"))
            except Usage as e:
                findings.append(_located(e, base.folder / f"{topic}.patch", root))
        for patch in patches:
            for check in (check_header, check_trailers, check_hunks, check_spdx):
                findings += _relative(((patch.path, at, why) for at, why in check(patch)), root)
            findings += _relative(((patch.path, at, why) for at, why in check_paths(patch)), root)
            findings += _relative(check_tests(patch, root), root)
            findings += _relative(check_seen(patch, ui), root)
        findings += _relative(check_order(series, patches), root)
        findings += _relative(check_overlay(base), root)
        findings += _relative(check_lock(base), root)
        if not findings:
            upstream = cached(base, ui)
            if upstream is None:
                notes.append(f"{base.tag} is not in the cache: that its patches are byte for byte what git would write was not checked (`apply` or `verify` fill the cache)")
            else:
                findings += _relative(check_canonical(base, upstream, ui), root)
    findings += _relative(check_overlay_used(root / "vllm_overlay", bases), root)
    return findings, notes


def _relative(reports, root: pathlib.Path) -> list[Report]:
    return [(str(pathlib.Path(path).relative_to(root)), at, why) for path, at, why in reports]


def _located(error: StackError, path: pathlib.Path, root: pathlib.Path) -> Report:
    match = re.match(r"(.+?):(\d+): (.*)", error.message, re.DOTALL)
    return _relative([(match[1], int(match[2]), match[3]) if match else (path, 1, error.message)], root)[0]


def check_series(base: Base, series: Series) -> Iterator[tuple[pathlib.Path, int, str]]:
    """Series and directory agree; nothing else lies in the directory."""
    listed = {f"{t}.patch" for t in series.patches}
    known = listed | {"series", "base.toml", "lock.json", "bundle.txt"}
    for path in sorted(base.folder.iterdir()):
        if path.name not in known:
            why = "is not listed in series" if path.suffix == ".patch" else "is no patch, series, base.toml, bundle.txt or lock.json"
            yield path, 1, why
    for topic in series.patches:
        if not (base.folder / f"{topic}.patch").exists():
            yield series.path, series.states[topic].line, f"{topic}.patch does not exist"
    if series.text and not series.text.endswith("\n"):
        yield series.path, len(series.text.splitlines()), "the last line has no line end"


def check_header(patch: PatchFile) -> Iterator[tuple[int, str]]:
    """`git format-patch` form: fixed first lines, full index lines, no signature, no diffstat."""
    lines = patch.data.decode("utf-8", "surrogateescape").split("\n")
    for number, (line, pattern) in enumerate(zip(lines, _HEADER, strict=False), 1):
        if not pattern.fullmatch(line) and not (number == 2 and line.startswith("From: =?")):
            yield number, f"expected {pattern.pattern!r}, found {line!r}"
            break
    first = patch.changes[0].at
    for number, line in enumerate(lines[: first - 1], 1):
        if line == "---":
            yield number, "a line `---` cuts the message (no diffstat, no notes)"
    if not patch.data.endswith(b"\n"):
        yield len(lines), "the last line has no line end"
    if lines[-3:-1] and lines[-3].startswith("-- "):
        yield len(lines) - 2, "git's version signature: export with --no-signature"
    for change in patch.changes:
        for at, header in change.headers:
            if header.startswith("index ") and not re.match(r"index [0-9a-f]{40}\.\.[0-9a-f]{40}( \d{6})?$", header):
                yield at, "the index line is abbreviated: 3-way needs full ids"


def check_trailers(patch: PatchFile) -> Iterator[tuple[int, str]]:
    """Every trailer once, with a value; Topic is the file's name; Upstream-Status is one of the four."""
    at = max(1, patch.changes[0].at - 2)
    for key in TRAILERS:
        values = patch.trailers.get(key, [])
        if not values or not values[0]:
            yield at, f"the trailer `{key}:` is missing"
        elif len(values) > 1 and key != "Signed-off-by":
            yield at, f"the trailer `{key}:` stands {len(values)} times"
    topic = patch.trailers.get("Topic", [""])[0]
    if topic and topic != patch.topic:
        yield at, f"`Topic: {topic}` is not the file's name"
    status = patch.trailers.get("Upstream-Status", [""])[0]
    if status and not UPSTREAM_STATUS.fullmatch(status):
        yield at, f"`Upstream-Status: {status}` is none of Pending, Submitted [where], Backport [what], Inappropriate [why]"
    signed = patch.trailers.get("Signed-off-by", [""])[0]
    if signed and not re.fullmatch(r".+ <[^@<>]+@[^@<>]+>", signed):
        yield at, f"`Signed-off-by: {signed}` is not `Name <mail>`"


def check_hunks(patch: PatchFile) -> Iterator[tuple[int, str]]:
    """Added lines: no conflict marker, no trailing white space, no carriage return that upstream does not have."""
    for change in patch.changes:
        for hunk in change.hunks:
            for offset, line in enumerate(hunk.lines, 1):
                text = line[1:]
                if line[:1] != "+":
                    continue
                if _CONFLICT.match(text) or text == "=======":
                    yield hunk.at + offset, f"{change.path}: a conflict marker"
                if text != text.rstrip() and not text.endswith("\r"):
                    yield hunk.at + offset, f"{change.path}: white space at the line end"


def check_spdx(patch: PatchFile) -> Iterator[tuple[int, str]]:
    """A new Python file says its licence."""
    for change in patch.changes:
        if change.old is None and change.path.endswith(".py") and change.hunks and not any(_SPDX in text for _, text in change.hunks[0].added()[:3]):
            yield change.at, f"{change.path}: a new file without `# {_SPDX}`"


def check_tests(patch: PatchFile, root: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, str]]:
    """Each test that `Tests:` names exists."""
    for entry in re.split(r"[,\s]+", patch.trailers.get("Tests", [""])[0]):
        if entry and not (root / entry.split("::")[0]).exists():
            yield patch.path, max(1, patch.changes[0].at - 2), f"`Tests:` names {entry}, which does not exist"


def check_seen(patch: PatchFile, ui: Ui) -> Iterator[tuple[pathlib.Path, int, str]]:
    """git sees the same files and the same lines in it as the other checks."""
    with Git.scratch(log=ui.git) as git, workspace.temporary() as folder:
        try:
            (mail,) = stack.read_mails(git, [patch], folder)
            done = git.try_run("apply", "--numstat", "-z", str(mail.diff))
            if done.returncode == 0:
                refuse_unseen(patch, done.stdout)
            else:
                yield patch.path, patch.changes[0].at, f"git cannot read it: {done.stderr.decode('utf-8', 'replace').strip()}"
        except Refused as e:
            yield patch.path, 1, e.message.removeprefix(f"{patch.path}: ")


def check_order(series: Series, patches: list[PatchFile]) -> Iterator[tuple[pathlib.Path, int, str]]:
    """`Requires:` names topics that stand above."""
    above: set[str] = set()
    for patch in patches:
        for need in re.split(r"[,\s]+", patch.trailers.get("Requires", [""])[0]):
            state = series.states.get(need)
            if need and need != "none" and need not in above and not (state and state.state == "upstream"):
                yield series.path, series.states[patch.topic].line, f"{patch.topic} requires {need}, which does not stand above it"
        above.add(patch.topic)


def check_overlay(base: Base) -> Iterator[tuple[pathlib.Path, int, str]]:
    """Overlay files that a base takes exist and say their licence."""
    for path in base.overlay:
        file = base.overlay_root / path
        if not file.is_file():
            yield base.folder / "base.toml", 1, f"overlay lists {path}, which vllm_overlay/ does not have"
        elif path.endswith(".py") and _SPDX not in file.read_text(encoding="utf-8")[:200]:
            yield file, 1, f"no `# {_SPDX}`"
    if len(set(base.overlay)) != len(base.overlay):
        yield base.folder / "base.toml", 1, "overlay lists a file twice"


def check_overlay_used(overlay_root: pathlib.Path, bases: list[Base]) -> Iterator[tuple[pathlib.Path, int, str]]:
    """Every overlay file belongs to some base."""
    used = {p for b in bases for p in b.overlay}
    for path in list_overlay(overlay_root) if overlay_root.exists() else []:
        if path not in used:
            yield overlay_root / path, 1, "no base.toml lists this overlay file"


def check_lock(base: Base) -> Iterator[tuple[pathlib.Path, int, str]]:
    """The lock describes the files beside it."""
    path = base.folder / "lock.json"
    try:
        lock = load_lock(base.folder)
        files = stack.read_stack(base)
    except StackError as e:
        yield path, 1, e.message
        return
    if [p.topic for p in lock.patches] != list(files.series.patches):
        yield path, 1, f"lists {[p.topic for p in lock.patches]}, series lists {list(files.series.patches)}"
    for patch, locked in zip(files.patches, lock.patches, strict=False):
        if patch.topic == locked.topic and patch.sha256 != locked.sha256:
            yield path, 1, f"{patch.topic}.patch has changed since the lock was written: run `apply.py export`"
    for name in sorted(files.overlay.keys() | lock.overlay.keys()):
        now = f"100644 {blob_id(files.overlay[name])}" if name in files.overlay else None
        if now != lock.overlay.get(name):
            yield path, 1, f"vllm_overlay/{name} has changed since the lock was written: run `apply.py export`"


def check_canonical(base: Base, upstream, ui: Ui) -> Iterator[tuple[pathlib.Path, int, str]]:
    """Each patch is what `export` would write for the commit it makes.

    Blob ids, line numbers and function names of hunk headers may be those of an earlier version of the stack: `export` keeps
    the bytes of a patch that only moved.
    """
    files = stack.read_stack(base)
    with Git.scratch(upstream.git_dir, log=ui.git) as scratch:
        try:
            built = stack.build(scratch, upstream.commit, files.patches, files.overlay)
        except StackError as e:
            yield files.series.path, 1, e.message
            return
        for patch, (_, commit, _) in zip(files.patches, built.steps, strict=True):
            wanted = render(scratch, commit, patch.path).data
            ours, theirs = _unplaced(patch.data), _unplaced(wanted)
            if ours != theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False), 1) if a != b), min(len(ours), len(theirs)))
                expected = theirs[at - 1].decode("utf-8", "replace") if at <= len(theirs) else "the end"
                yield patch.path, at, f"not in canonical form: git writes {expected!r} here; run `apply.py export`"


def _unplaced(data: bytes) -> list[bytes]:
    """The lines of a patch without what changes when other patches move it."""
    data = re.sub(rb"(?m)^index [0-9a-f]{40}\.\.[0-9a-f]{40}", b"index", data)
    return re.sub(rb"(?m)^@@ -\d+((?:,\d+)?) \+\d+((?:,\d+)?) @@.*$", rb"@@ -\1 +\2 @@", data).split(b"\n")
