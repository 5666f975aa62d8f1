# SPDX-License-Identifier: Apache-2.0
"""A patch file as `git format-patch` writes it: message, trailers, hunks. Read only; git applies and writes patches."""
import hashlib
import pathlib
import re
from dataclasses import dataclass, field

from .errors import Refused, Usage

TRAILERS = ("Topic", "Upstream-Status", "Origin", "Retire-When", "Requires", "Tests", "Signed-off-by")
UPSTREAM_STATUS = re.compile(r"(Pending|Submitted \[[^\]]+\]|Backport \[[^\]]+\]|Inappropriate \[[^\]]+\])")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SYMLINK_OR_SUBMODULE = re.compile(r"(?:new file mode|new mode|old mode|deleted file mode|index [0-9a-f]+\.\.[0-9a-f]+) (120000|160000)$")


@dataclass(frozen=True)
class Hunk:
    """One hunk. `lines` keep their first character (space, minus or plus) and lose the line end. `at` is the line in the patch file."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[str, ...]
    at: int

    @property
    def before(self) -> list[str]:
        """The lines the hunk expects to find."""
        return [line[1:] for line in self.lines if line[:1] in (" ", "-")]

    def added(self) -> list[tuple[int, str]]:
        """(line number in the new file, text) of every added line."""
        number, out = self.new_start, []
        for line in self.lines:
            if line[:1] == "+":
                out.append((number, line[1:]))
            if line[:1] in ("+", " "):
                number += 1
        return out


@dataclass
class FileChange:
    """The change to one path. `old`/`new`: path, or None where the file is created or deleted."""

    old: str | None
    new: str | None
    at: int
    hunks: list[Hunk] = field(default_factory=list)
    headers: list[tuple[int, str]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.new or self.old or ""


@dataclass
class PatchFile:
    """`topic` is the file's name without .patch; `message_lines` are (line number, text) of subject and body."""

    path: pathlib.Path
    data: bytes
    topic: str
    subject: str
    trailers: dict[str, list[str]]
    changes: list[FileChange]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def paths(self) -> list[str]:
        """Every path the patch touches, sorted."""
        return sorted({p for c in self.changes for p in (c.old, c.new) if p})


def _unquote(name: str) -> str:
    """Undo git's C-style quoting of unusual path names."""
    if not (name.startswith('"') and name.endswith('"')):
        return name
    return name[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")


def _side(name: str, prefix: str) -> str | None:
    name = _unquote(name.split("\t")[0])
    if name == "/dev/null":
        return None
    return name.removeprefix(prefix)


def read_patch(path: pathlib.Path) -> PatchFile:
    """Parse a patch file. Raises Usage as `path:line: why` when it is no patch, or is cut off inside a hunk."""
    try:
        return parse_patch(path.read_bytes(), path)
    except FileNotFoundError:
        raise Usage(f"{path} is missing", f"{path.parent / 'series'} lists it: restore the file or take the line out") from None


def parse_patch(data: bytes, path: pathlib.Path) -> PatchFile:
    """`read_patch` on bytes."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    changes: list[FileChange] = []
    number = 0
    header_end = len(lines)
    while number < len(lines):
        line = lines[number]
        if line.startswith("diff --git "):
            header_end = min(header_end, number)
            match = re.fullmatch(r'diff --git ("?a/.+?"?) ("?b/.+"?)', line)
            change = FileChange(_side(match[1], "a/") if match else None, _side(match[2], "b/") if match else None, number + 1)
            half = re.fullmatch(r"diff --git a/(.+) b/\1", line)
            if half:  # a path with spaces splits in one way only when both sides agree
                change.old = change.new = half[1]
            changes.append(change)
        elif changes and line.startswith("--- ") and not changes[-1].hunks:
            changes[-1].old = _side(line[4:], "a/")
        elif changes and line.startswith("+++ ") and not changes[-1].hunks:
            changes[-1].new = _side(line[4:], "b/")
        elif changes and (match := _HUNK.match(line)):
            old_left, new_left = int(match[2] or 1), int(match[4] or 1)
            counts = (int(match[1]), old_left, int(match[3]), new_left)
            start, body = number, []
            while old_left or new_left:
                number += 1
                text = lines[number] if number < len(lines) else None
                if text is None or text[:1] not in (" ", "-", "+", "\\"):
                    raise Usage(f"{path}:{min(number, len(lines)) + 1}: the hunk that starts in line {start + 1} is cut off: {old_left} old and {new_left} new lines are missing",
                                "restore the file from version control, or export it again")  # fmt: skip
                body.append(text)
                old_left -= text[0] in " -"
                new_left -= text[0] in " +"
            changes[-1].hunks.append(Hunk(*counts, tuple(body), start + 1))
        elif changes:
            changes[-1].headers.append((number + 1, line))
            if line.startswith("new file mode"):
                changes[-1].old = None
            elif line.startswith("deleted file mode"):
                changes[-1].new = None
        number += 1
    if not changes:
        raise Usage(f"{path}:1: no `diff --git` line: this is not a patch")
    subject, trailers = _read_message(lines[:header_end])
    return PatchFile(path, data, path.name.removesuffix(".patch"), subject, trailers, changes)


def _read_message(lines: list[str]) -> tuple[str, dict[str, list[str]]]:
    subject, trailers = "", {}
    body_at = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    for i, line in enumerate(lines[:body_at]):
        if line.startswith("Subject:"):
            parts = [line.removeprefix("Subject:").strip()]
            for following in lines[i + 1 : body_at]:
                if not following.startswith(" "):
                    break
                parts.append(following.strip())
            subject = re.sub(r"^\[PATCH\] ", "", " ".join(parts))
    body = lines[body_at:]
    if "---" in body:
        body = body[: body.index("---")]
    while body and not body[-1].strip():
        body.pop()
    for line in reversed(body):  # the last paragraph holds the trailers
        if not line.strip():
            break
        match = re.fullmatch(r"([A-Za-z][A-Za-z-]*): ?(.*)", line)
        if match:
            trailers.setdefault(match[1], []).insert(0, match[2].strip())
    return subject, trailers


def unsafe_path(path: str) -> str | None:
    """Why `path` may not be written below the tree, or None if it may."""
    parts = path.split("/")
    if path.startswith("/") or re.match(r"[A-Za-z]:", path) or "\\" in path:
        return "is absolute or has a backslash"
    if ".." in parts or "." in parts or "" in parts:
        return "leaves the tree or is not normal"
    if parts[0].lower() == ".git" or any(p.lower() == ".git" for p in parts):
        return "lies in .git"
    if any(ord(c) < 32 for c in path):
        return "has a control character"
    return None


def check_paths(patch: PatchFile) -> list[tuple[int, str]]:
    """(line, why) for every path or mode that a patch of this stack may not have."""
    findings = []
    for change in patch.changes:
        for side in {change.old, change.new} - {None}:
            if why := unsafe_path(side):
                findings.append((change.at, f"the path {side!r} {why}"))
        for at, header in change.headers:
            if _SYMLINK_OR_SUBMODULE.match(header):
                findings.append((at, f"{change.path}: symbolic links and submodules are not patched here"))
            if header.startswith(("rename ", "copy ", "similarity ")):
                findings.append((at, f"{change.path}: renames and copies must be written out (`--no-renames`)"))
            if header.startswith(("GIT binary patch", "Binary files")):
                findings.append((at, f"{change.path}: binary change"))
    return findings


def refuse_unsafe(patch: PatchFile) -> None:
    """Raise Refused if `check_paths` has a finding."""
    findings = check_paths(patch)
    if findings:
        raise Refused("\n".join(f"{patch.path}:{at}: {why}" for at, why in findings), "mend the patch; nothing was applied")


def refuse_unseen(patch: PatchFile, numstat: bytes) -> None:
    """Refuse a patch in which git sees other files, or more lines, than the reader above. `numstat`: what `git apply --numstat -z` said."""
    git_sees: dict[str, list[int]] = {}
    for record in numstat.decode("utf-8", "surrogateescape").split("\0"):
        if record:
            added, deleted, path = record.split("\t", 2)
            counts = git_sees.setdefault(path, [0, 0])
            counts[0] += int(added) if added != "-" else 0
            counts[1] += int(deleted) if deleted != "-" else 0
    we_see: dict[str, list[int]] = {}
    for change in patch.changes:
        counts = we_see.setdefault(change.path, [0, 0])
        for hunk in change.hunks:
            counts[0] += sum(line[:1] == "+" for line in hunk.lines)
            counts[1] += sum(line[:1] == "-" for line in hunk.lines)
    differ = sorted(path for path in git_sees.keys() | we_see.keys() if git_sees.get(path) != we_see.get(path))
    if differ:
        shown = "".join(f"\n- {path}: git {_counts(git_sees.get(path))}, by its `diff --git` lines {_counts(we_see.get(path))}" for path in differ)
        raise Refused(f"{patch.path}: git would change something else than the patch shows:{shown}", "a hunk without a `diff --git` line, or an encoded mail: write the patch anew with `apply.py export`")


def _counts(counts: list[int] | None) -> str:
    return "nothing" if counts is None else f"+{counts[0]} -{counts[1]} lines"


def explain_failure(patch: PatchFile, stderr: str, read_lines) -> str:
    """Why git refused a patch: patch, file, hunk, the lines it expected and the closest ones found.

    `stderr` is what `git apply` said; `read_lines(path)` gives the file's present lines, None if there is no such file.
    """
    match = re.search(r"error: patch failed: (.+):(\d+)", stderr)
    missing = re.search(r"error: (.+?): (?:does not exist in index|No such file or directory|already exists in index)", stderr)
    if not match:
        where = f"\n  file: {missing[1]}" if missing else ""
        return f"{patch.path} does not apply:{where}\n  git: {stderr.strip()}"
    path, start = match[1], int(match[2])
    hunk, index = next(((h, i) for c in patch.changes if c.path == path or c.old == path for i, h in enumerate(c.hunks, 1) if h.old_start == start), (None, 0))
    found = read_lines(path)
    text = f"{patch.path} does not apply:\n  file: {path}\n"
    if hunk is None:
        return text + f"  git: {stderr.strip()}"
    text += f"  hunk {index} ({patch.path.name}:{hunk.at}, old line {hunk.old_start})\n  expected:\n" + "".join(f"    {line}\n" for line in hunk.before)
    if found is None:
        return text + "  found: no such file"
    at = _closest(hunk.before, found, hunk.old_start - 1)
    shown = found[at : at + len(hunk.before)]
    text += f"  found at line {at + 1}:\n" + "".join(f"    {'  ' if s in hunk.before else '! '}{s}\n" for s in shown)
    return text.rstrip("\n")


def _closest(wanted: list[str], lines: list[str], guess: int) -> int:
    """Start of the window of `lines` most like `wanted`; near `guess` on a tie."""
    import difflib

    best, best_score = max(0, min(guess, len(lines) - 1)), -1.0
    matcher = difflib.SequenceMatcher(a=wanted, autojunk=False)
    keys = {w for w in wanted if w.strip()}
    for start in range(max(1, len(lines) - len(wanted) + 1)):
        window = lines[start : start + len(wanted)]
        if not keys & set(window):
            continue
        matcher.set_seq2(window)
        score = matcher.ratio() - 1e-6 * abs(start - guess)
        if score > best_score:
            best, best_score = start, score
    return best
