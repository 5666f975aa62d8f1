# SPDX-License-Identifier: Apache-2.0
"""How far is the stack from another release? The whole stack, always; nothing on disk changes but the cache.

Each patch is tried on the new tree: strictly, then by 3-way merge. The next patch goes on top of what could be carried, so
one conflict does not hide the rest. What could be carried is then checked against the new tree by `semantic`.
"""
import ast
import difflib
import glob
import pathlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from . import semantic, stack, workspace
from .export import render
from .git import Git
from .patchfile import PatchFile
from .report import Ui
from .semantic import Finding
from .symbols import Definition, Symbols
from .trees import GitTree
from .upstream import Upstream

CLEAN, OFFSET, THREE_WAY, UPSTREAM, CONFLICT, MISSING = "clean", "offset", "3-way", "already-upstream", "conflict", "missing file"
STATES = (CLEAN, OFFSET, THREE_WAY, UPSTREAM, CONFLICT, MISSING)
_MARKER = 37  # long enough that no line of a file is taken for a conflict marker


@dataclass(frozen=True)
class Region:
    """One place where a 3-way merge needs a human. `ours`: the stack; `theirs`: the new release, with the patches before; `line` is in that. `moved_by`: upstream commit and subject, from carved history."""

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
    with Git.scratch(old.git_dir, new.git_dir, log=ui.git) as git:
        built = stack.build(git, old.commit, files.patches, files.overlay)
        # Rendered again, so that every index line names a blob that 3-way can find.
        patches = [render(git, commit, p.path) for p, (_, commit, _) in zip(files.patches, built.steps, strict=True)]
        new_tree = git.tree_of(new.commit)
        collisions = sorted(git.blobs(new_tree, sorted(files.overlay)))
        overlay = {p: d for p, d in files.overlay.items() if p not in collisions}
        with workspace.temporary() as folder:
            tree = stack.build(git, new.commit, (), overlay).tree
            index = git.with_index(folder / "index")
            index.run("read-tree", tree)
            reports = []
            for number, patch in enumerate(patches):
                ui.progress(f"trying the stack on {ref}", number, len(patches))
                report, tree = _try(index, built.base_tree, tree, patch, version, history)
                reports.append(report)
            ui.progress(f"trying the stack on {ref}", len(patches), len(patches))
        _blame_requirements(files, reports)
        left_behind = [p for p, r in zip(patches, reports, strict=True) if r.state in (CONFLICT, MISSING)]
        findings = _findings(git, GitTree(git, built.tree), built, new_tree, tree, left_behind)
    return Drift(files.base.tag, ref, reports, collisions, findings)


def _try(index: Git, old_base: str, tree: str, patch: PatchFile, version: str, history) -> tuple[PatchDrift, str]:
    """(report, tree after it). The index holds `tree` before, and the returned tree after."""
    report = PatchDrift(patch.topic, CLEAN)
    diff = patch.data[patch.data.index(b"diff --git ") :]
    present = index.blobs(tree, patch.paths)
    report.missing = sorted({c.old for c in patch.changes if c.old and c.old not in present})
    report.signals = declared(patch, version)
    strict = index.try_run("apply", "--cached", "--check", "--verbose", "-", input=diff)
    if strict.returncode and index.try_run("apply", "--cached", "--check", "--reverse", "-", input=diff).returncode == 0:
        report.state, report.missing = UPSTREAM, []  # a file that the patch removes may be gone already
        report.signals.insert(0, "reverse: the change, taken back, applies to the new release")
        return report, tree
    if strict.returncode == 0:
        report.offsets = _offsets(strict.stderr.decode("utf-8", "replace"))
        report.state = OFFSET if report.offsets else CLEAN
        done = index.try_run("apply", "--cached", "-", input=diff)
        if done.returncode == 0:
            return report, index.text("write-tree")
        return _cannot_try(index, tree, report, done.stderr)  # `--check` does not see a folder where a file goes
    if report.missing:
        report.state = MISSING
        report.note = "; ".join(f"{path}: {where_did_it_go(index, old_base, tree, path)}" for path in report.missing)
        # The other files of the patch are tried too, so that their conflicts are known.
        index.try_run("apply", "--cached", "--3way", *(f"--exclude={glob.escape(path)}" for path in report.missing), "-", input=diff)
        report.regions = _regions(index, index.text("ls-files", "--unmerged", "-z"), history)
        index.run("read-tree", tree)
        return report, tree
    merge = index.try_run("apply", "--cached", "--3way", "-", input=diff)
    unmerged = index.text("ls-files", "--unmerged", "-z")
    if merge.returncode and not unmerged:  # git could not even try: another kind of file stands there
        return _cannot_try(index, tree, report, merge.stderr)
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


def _cannot_try(index: Git, tree: str, report: PatchDrift, stderr: bytes) -> tuple[PatchDrift, str]:
    report.state = CONFLICT
    report.note = "git cannot carry it: " + "; ".join(re.findall(r"^error: (.*)$", stderr.decode("utf-8", "replace"), re.MULTILINE))
    index.run("read-tree", tree)
    return report, tree


def _offsets(said: str) -> list[str]:
    """`path: hunk N ...` for every hunk that moved, from what `git apply --verbose` said."""
    found, path = [], ""
    for line in said.splitlines():
        if match := re.fullmatch(r"Checking patch (.+?)(?: => .+)?\.\.\.", line):
            path = match[1]
        elif match := re.fullmatch(r"Hunk #(\d+) succeeded at (.*?)\.?", line):
            found.append(f"{path}: hunk {match[1]} is at line {match[2]}")
    return found


def where_did_it_go(git: Git, old: str, new: str, path: str) -> str:
    """What became of a file that is gone: a package, another name, or its functions in other files."""
    stem = path.removesuffix(".py")
    became = "gone"
    if git.blobs(new, [f"{stem}/__init__.py"]):
        became = f"is a package now ({stem}/)"
    else:
        # Only what was added can be the new name; git compares contents.
        renames = git.text("diff-tree", "-r", "-z", "--find-renames=40%", "--diff-filter=R", "-l0", "--name-status", old, new).split("\0")
        found = {was: (kind, now) for kind, was, now in zip(renames[::3], renames[1::3], renames[2::3], strict=False)}
        if path in found:
            return f"renamed to {found[path][1]} ({int(found[path][0][1:])}% alike)"
    source = git.try_run("cat-file", "blob", f"{old}:{path}").stdout.decode("utf-8", "replace")
    names = re.findall(r"^(?:async def|def|class) (\w+)", source, re.MULTILINE)
    if not names:
        return became
    out = git.try_run("grep", "-c", "-E", rf"^(async def|def|class) ({'|'.join(names)})\b", new, "--", "vllm/*.py").stdout.decode("utf-8", "surrogateescape")
    counts = sorted(((int(n), p) for p, n in (line.split(":", 1)[1].rsplit(":", 1) for line in out.splitlines())), reverse=True)
    homes = ", ".join(f"{p} ({n})" for n, p in counts[:4])
    return f"{became}; of its {len(names)} functions and classes, the new release has some in {homes}" if homes else became


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
        with workspace.temporary() as folder:
            names = []
            # `apply --3way`: stage 2 is the new release, stage 3 the patched old one.
            for label, stage in (("ours", "3"), ("base", "1"), ("theirs", "2")):
                file = folder / label
                file.write_bytes(index.run("cat-file", "blob", blobs[stage]) if stage in blobs else b"")
                names.append(str(file))
            merged = index.try_run("merge-file", "-p", "--diff3", f"--marker-size={_MARKER}", "-L", "ours", "-L", "base", "-L", "theirs", *names).stdout.decode("utf-8", "replace").splitlines()
            theirs = pathlib.Path(names[2]).read_text(encoding="utf-8", errors="replace").splitlines()
        for region in _parse_conflicts(path, merged, theirs):
            regions.append(region if history is None else Region(**{**asdict(region), "moved_by": history(region)}))
    return regions


def _parse_conflicts(path: str, merged: list[str], theirs: list[str]) -> list[Region]:
    found: list[tuple[int, dict[str, list[str]]]] = []
    section, parts, taken = None, {}, []  # `taken`: the merge with every conflict decided for the new release
    for line in merged:
        if line == "<" * _MARKER + " ours":
            section, parts = "ours", {"ours": [], "base": [], "theirs": []}
        elif section == "ours" and line == "|" * _MARKER + " base":
            section = "base"
        elif section == "base" and line == "=" * _MARKER:
            section = "theirs"
        elif section == "theirs" and line == ">" * _MARKER + " theirs":
            found.append((len(taken), parts))
            taken += parts["theirs"]
            section = None
        elif section:
            parts[section].append(line)
        else:
            taken.append(line)
    blocks = difflib.SequenceMatcher(None, taken, theirs, autojunk=False).get_opcodes() if found else []

    def line_of(at: int) -> int:
        return next((j1 + (at - i1 if kind == "equal" else 0) for kind, i1, i2, j1, _ in blocks if i1 <= at < i2), len(theirs)) + 1

    return [Region(path, line_of(at), **parts) for at, parts in found]


def pull_requests(patch: PatchFile) -> list[str]:
    """Numbers of the upstream pull requests that a patch names as its own."""
    return re.findall(r"vllm-project/vllm#(\d+)", " ".join(patch.trailers.get("Upstream-Status", []) + patch.trailers.get("Retire-When", [])))


def declared(patch: PatchFile, version: str) -> list[str]:
    """`Retire-When: base >= vX` holds for the new release."""
    match = re.search(r"base >= v?([\d.]+)", " ".join(patch.trailers.get("Retire-When", [])))
    if match and numbers(version) >= numbers(match[1]):
        return [f"declared: Retire-When says base >= v{match[1]}"]
    return []


def numbers(version: str) -> list[int]:
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
        if (f.path, f.why) not in was and not _brings(ours, f.why):
            out.append(Finding(f.path, f.line, f.why + _was_and_is(git, old, built.tree, new_tree, f.why)))
    return out


def _brings(added: str, why: str) -> bool:
    """Whether added lines bind the name or parameter that a finding misses."""
    match = re.search(r"imports (\w+) from|no name '(\w+)'|reads (VLLM_\w+)|the name '(\w+)'|no parameter '(\w+)'", why)
    if not match:
        return False
    name = match[match.lastindex]
    return re.search(rf"\b(import|as|def|class) (.*\b)?{name}\b|\b{name}(: [^=]+)? ?=(?!=)|\"{name}\" ?:|^ *{name}(: [^#]+)?,? *(#.*)?$|\(.*\b{name}: ", added, re.MULTILINE) is not None


def _was_and_is(git: Git, old: Symbols, old_tree: str, new_tree: str, why: str) -> str:
    """Where the old release had what a finding is about, with its signature, and where the new one has it."""
    if match := re.search(r"imports (?P<name>\w+) from (?P<module>[\w.]+)|(?P<outer>[\w.]+) has no name '(?P<member>\w+)'", why):
        name = match["name"] or match["member"]
        place = old.lookup(match["module"] or match["outer"], name, type_only=True)
        return (f"; it was in {_place(old, place)}" if place else "") + _defined_in(git, new_tree, name)
    if match := re.search(r"the call of (?:[\w.]*\.)?(\w+) does not bind", why):
        return _signature(git, old_tree, match[1])
    return ""


def _signature(git: Git, tree: str, name: str) -> str:
    """The parameters that a function or class had, if just one has that name."""
    out = git.try_run("grep", "-n", "-E", rf"^ *(async )?def {name}\(|^class {name}\b", tree, "--", "vllm/*.py").stdout.decode("utf-8", "replace").splitlines()
    if len(out) != 1:
        return ""
    _, path, line, _ = out[0].split(":", 3)
    module = ast.parse(git.run("cat-file", "blob", f"{tree}:{path}"))
    node = next((n for n in ast.walk(module) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name == name), None)
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    return f"; was ({path}:{line}) {name}({ast.unparse(node.args)})" if node else ""


def _place(symbols: Symbols, found: tuple[str, Definition]) -> str:
    return f"{symbols.path_of(found[0])}:{getattr(found[1].node, 'lineno', 1)}"


def _defined_in(git: Git, tree: str, name: str) -> str:
    """Where the new release defines a name that an import no longer finds."""
    done = git.try_run("grep", "-l", "-E", rf"^(def|class|async def) {re.escape(name)}\b|^{re.escape(name)}(:| =)", tree, "--", "vllm/*.py")
    found = [line.split(":", 1)[1] for line in done.stdout.decode().splitlines()]
    return f"; now in {', '.join(found[:3])}" if found else ""


