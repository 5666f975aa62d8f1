# SPDX-License-Identifier: Apache-2.0
"""How far is the stack from another release? The whole stack, always; nothing on disk changes but the cache.

Each patch is tried on the new tree: strictly, then by 3-way merge. The next patch goes on top of what could be carried, so
one conflict does not hide the rest. What could be carried is then checked against the new tree by `semantic`.
"""
import pathlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from . import semantic, stack
from .export import render
from .git import Git
from .patchfile import PatchFile
from .pins import Base
from .report import Ui
from .semantic import Finding
from .symbols import Symbols
from .trees import GitTree
from .upstream import Upstream

CLEAN, OFFSET, THREE_WAY, UPSTREAM, CONFLICT, MISSING = "clean", "offset", "3-way", "already-upstream", "conflict", "missing file"
STATES = (CLEAN, OFFSET, THREE_WAY, UPSTREAM, CONFLICT, MISSING)


@dataclass(frozen=True)
class Region:
    """One place where a 3-way merge needs a human. `ours`: the stack; `theirs`: the new release. `moved_by`: upstream commit and subject, from carved history."""

    path: str
    line: int
    ours: list[str]
    base: list[str]
    theirs: list[str]
    moved_by: str | None = None


@dataclass
class PatchDrift:
    """`offsets`: what git said of moved hunks. `signals`: why the patch may retire, strongest first."""

    topic: str
    state: str
    offsets: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Drift:
    """The report on one release. `commit`: what the stack becomes on it, of the patches that could be carried."""

    base: str
    ref: str
    patches: list[PatchDrift]
    overlay_collisions: list[str]
    findings: list[Finding]

    @property
    def needs_work(self) -> bool:
        return bool(self.overlay_collisions or self.findings or any(p.state in (CONFLICT, MISSING) for p in self.patches))

    def payload(self) -> dict:
        return {"base": self.base, "ref": self.ref, "patches": [asdict(p) for p in self.patches], "overlay_collisions": self.overlay_collisions,
                "findings": [asdict(f) for f in self.findings], "needs_work": self.needs_work}  # fmt: skip


def analyse(files: stack.StackFiles, old: Upstream, new: Upstream, ref: str, version: str, history: "Callable[[Region], str | None] | None", ui: Ui) -> Drift:
    """Try the stack of `files` (on `old`) on the tree of `new`. `history` names the upstream commit that moved a region."""
    with Git.scratch(old.git_dir, log=ui.git) as git:
        git.alternates = (*git.alternates, new.git_dir / "objects")
        built = stack.build(git, old.commit, files.patches, files.overlay)
        # Rendered again, so that every index line names a blob that 3-way can find.
        patches = [render(git, commit, p.path) for p, (_, commit, _) in zip(files.patches, built.steps, strict=True)]
        new_tree = git.text("rev-parse", f"{new.commit}^{{tree}}")
        collisions = sorted(git.blobs(new_tree, sorted(files.overlay)))
        overlay = {p: d for p, d in files.overlay.items() if p not in collisions}
        with tempfile.TemporaryDirectory() as folder:
            index = git.with_index(pathlib.Path(folder, "index"))
            index.run("read-tree", new.commit)
            commit, tree = new.commit, new_tree
            if overlay:
                commit, tree = stack.commit_overlay(index, commit, tree, overlay)
            reports = []
            for number, patch in enumerate(patches):
                ui.progress(f"trying the stack on {ref}", number, len(patches))
                report, tree = _try(index, tree, patch, version, history)
                reports.append(report)
            ui.progress(f"trying the stack on {ref}", len(patches), len(patches))
        _blame_requirements(files, reports)
        left_behind = [p for p, r in zip(patches, reports, strict=True) if r.state in (CONFLICT, MISSING)]
        findings = _findings(git, GitTree(git, built.tree), built, new_tree, tree, left_behind)
    return Drift(files.base.tag, ref, reports, collisions, findings)


def _try(index: Git, tree: str, patch: PatchFile, version: str, history) -> tuple[PatchDrift, str]:
    """(report, tree after it). The index holds `tree` before, and the returned tree after."""
    report = PatchDrift(patch.topic, CLEAN)
    diff = patch.data[patch.data.index(b"diff --git ") :]
    present = index.blobs(tree, patch.paths)
    report.missing = sorted({c.old for c in patch.changes if c.old and c.old not in present})
    report.signals = _declared(patch, version)
    strict = index.try_run("apply", "--cached", "--check", "--verbose", "-", input=diff)
    if not report.missing and index.try_run("apply", "--cached", "--check", "--reverse", "-", input=diff).returncode == 0 and strict.returncode:
        report.state = UPSTREAM
        report.signals.insert(0, "reverse: the change, taken back, applies to the new release")
        return report, tree
    if strict.returncode == 0:
        report.offsets = re.findall(r"^Hunk #\d+ succeeded at .*$", strict.stderr.decode("utf-8", "replace"), re.MULTILINE)
        report.state = OFFSET if report.offsets else CLEAN
        index.run("apply", "--cached", "-", input=diff)
        return report, index.text("write-tree")
    if report.missing:
        report.state = MISSING
        report.note = "; ".join(f"{path}: {_where_did_it_go(index, tree, path)}" for path in report.missing)
        return report, tree
    index.try_run("apply", "--cached", "--3way", "-", input=diff)
    unmerged = index.text("ls-files", "--unmerged", "-z")
    if not unmerged:
        after = index.text("write-tree")
        if after == tree:
            report.state = UPSTREAM
            report.signals.insert(0, "empty: nothing is left of the change after a 3-way merge")
        else:
            report.state = THREE_WAY
        return report, after
    report.state = CONFLICT
    report.regions = _regions(index, unmerged, history)
    index.run("read-tree", tree)
    return report, tree


def _where_did_it_go(index: Git, tree: str, path: str) -> str:
    """A file that is gone may have become a package, or moved to a folder where its name still stands."""
    name = path.rsplit("/", 1)[-1]
    paths = index.text("ls-tree", "-r", "--name-only", "-z", tree).split("\0")
    stem = path.removesuffix(".py")
    if f"{stem}/__init__.py" in paths:
        return f"is a package now ({stem}/: {', '.join(p.rsplit('/', 1)[-1] for p in paths if p.startswith(stem + '/'))})"
    same = [p for p in paths if p.rsplit("/", 1)[-1] == name and p.split("/")[0] == path.split("/")[0]]
    return f"gone; the name stands at {', '.join(same[:3])}" if same and name != "__init__.py" else "gone"


def _regions(index: Git, unmerged: str, history) -> list[Region]:
    """The conflict regions of every unmerged path, from git's own merge."""
    stages: dict[str, dict[str, str]] = {}
    for record in unmerged.split("\0"):
        if record:
            meta, path = record.split("\t", 1)
            _, oid, stage = meta.split(" ")
            stages.setdefault(path, {})[stage] = oid
    regions = []
    for path, blobs in stages.items():
        with tempfile.TemporaryDirectory() as folder:
            names = []
            # `apply --3way`: stage 2 is the new release, stage 3 the patched old one.
            for label, stage in (("ours", "3"), ("base", "1"), ("theirs", "2")):
                file = pathlib.Path(folder, label)
                file.write_bytes(index.run("cat-file", "blob", blobs[stage]) if stage in blobs else b"")
                names.append(str(file))
            merged = index.try_run("merge-file", "-p", "--diff3", "-L", "ours", "-L", "base", "-L", "theirs", *names).stdout.decode("utf-8", "replace").splitlines()
            theirs = pathlib.Path(names[2]).read_text(encoding="utf-8", errors="replace").splitlines()
        for region in _parse_conflicts(path, merged, theirs):
            regions.append(region if history is None else Region(**{**asdict(region), "moved_by": history(region)}))
    return regions


def _parse_conflicts(path: str, merged: list[str], theirs: list[str]) -> list[Region]:
    regions, section, parts = [], None, {}
    at = 0  # line of the new release that the merge has reached
    for line in merged:
        if line == "<<<<<<< ours":
            section, parts = "ours", {"ours": [], "base": [], "theirs": []}
        elif section == "ours" and line == "||||||| base":
            section = "base"
        elif section == "base" and line == "=======":
            section = "theirs"
        elif section == "theirs" and line == ">>>>>>> theirs":
            found = _find(theirs, parts["theirs"], at)
            regions.append(Region(path, found + 1, **parts))
            at, section = found + len(parts["theirs"]), None
        elif section:
            parts[section].append(line)
        elif line in theirs[at : at + 200]:
            at = theirs.index(line, at) + 1
    return regions


def _find(lines: list[str], wanted: list[str], start: int) -> int:
    """Where `wanted` stands in `lines`, at or after `start`; `start` if nowhere."""
    return next((i for i in range(start, len(lines) - len(wanted) + 1) if lines[i : i + len(wanted)] == wanted), start)


def pull_requests(patch: PatchFile) -> list[str]:
    """Numbers of the upstream pull requests that a patch names as its own."""
    return re.findall(r"vllm-project/vllm#(\d+)", " ".join(patch.trailers.get("Upstream-Status", []) + patch.trailers.get("Retire-When", [])))


def _declared(patch: PatchFile, version: str) -> list[str]:
    """`Retire-When: base >= vX` holds for the new release."""
    match = re.search(r"base >= v?([\d.]+)", " ".join(patch.trailers.get("Retire-When", [])))
    if match and _numbers(version) >= _numbers(match[1]):
        return [f"declared: Retire-When says base >= v{match[1]}"]
    return []


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def _blame_requirements(files: stack.StackFiles, reports: list[PatchDrift]) -> None:
    """Say of a patch that could not be carried that one it requires could not either."""
    stuck: set[str] = set()
    for patch, report in zip(files.patches, reports, strict=True):
        needs = {n for n in re.split(r"[,\s]+", patch.trailers.get("Requires", [""])[0]) if n} & stuck
        if report.state in (CONFLICT, MISSING):
            stuck.add(report.topic)
        if needs:
            report.note = "; ".join(filter(None, [report.note, f"requires {', '.join(sorted(needs))}, which was not carried"]))


def _findings(git: Git, old_tree: GitTree, built: stack.Built, new_base: str, new_tree: str, left_behind: list[PatchFile]) -> list[Finding]:
    """What our lines use and the new release lacks or has with another signature; where the old release had it.

    A name that a patch of ours brings, which could not be carried, is no finding: it comes with that patch.
    """
    ours = "\n".join(text for p in left_behind for c in p.changes for h in c.hunks for _, text in h.added())
    findings = semantic.check(GitTree(git, new_tree), semantic.added_lines(git, new_base, new_tree))
    was = {(f.path, f.why) for f in semantic.check(old_tree, semantic.added_lines(git, built.base_tree, built.tree))}
    old = Symbols(old_tree)
    out = []
    for f in findings:
        named = re.search(r"imports (\w+) from|no name '(\w+)'|reads (VLLM_\w+)", f.why)
        if (f.path, f.why) in was or (named and re.search(rf"\b{next(filter(None, named.groups()))}\b", ours)):
            continue
        match = re.search(r"imports (\w+) from ([\w.]+)", f.why)
        place = old.lookup(match[2], match[1], type_only=True) if match else None
        before = f"; it was in {old.path_of(place[0])}:{getattr(place[1].node, 'lineno', 1)}" if place else ""
        moved = _defined_in(git, new_tree, match[1]) if match else ""
        out.append(Finding(f.path, f.line, f.why + before + moved))
    return out


def _defined_in(git: Git, tree: str, name: str) -> str:
    """Where the new release defines a name that an import no longer finds."""
    done = git.try_run("grep", "-l", "-E", rf"^(def|class|async def) {re.escape(name)}\b|^{re.escape(name)}(:| =)", tree, "--", "vllm/*.py")
    found = [line.split(":", 1)[1] for line in done.stdout.decode().splitlines()]
    return f"; now in {', '.join(found[:3])}" if found else ""


