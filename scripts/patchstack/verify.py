# SPDX-License-Identifier: Apache-2.0
"""Check a patched tree: is it what the lock says, and does what we added fit the tree it landed in?"""
import pathlib
from dataclasses import dataclass

from . import place, semantic, state
from .errors import Refused
from .export import find_base_commit
from .git import Git
from .lock import Lock, load_lock
from .pins import Base
from .report import Ui
from .semantic import Finding
from .trees import GitTree
from .upstream import fetch, import_directory


@dataclass(frozen=True)
class Verified:
    """`level`: exact, touched or None. `checked`: names of what was looked at, for the report."""

    base: Base
    level: str | None
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]


def verify(target: pathlib.Path, bases: list[Base], each: bool, ui: Ui) -> Verified:
    """Raises Refused when `target` is not a tree of any base; Usage when it is no directory."""
    found = state.inspect(target, bases, ui)
    if found.base is None:
        raise Refused(f"{target} is not a tree of any pinned base: {found.detail}", found.next_step)
    base, lock = found.base, load_lock(found.base.folder)
    if (target / ".git").exists():
        git = place.repository_of(target, ui)
        tree = git.text("rev-parse", "HEAD^{tree}")
        findings = [Finding(p, 1, "has a change that is not committed") for p in place.dirty_paths(git)]
        base_commit = find_base_commit(git, base, lock.base_tree, target)
        with Git.scratch(git.git_dir, log=ui.git) as scratch:
            return _check(scratch, base, lock, found, base_commit, git.text("rev-parse", "HEAD"), tree, findings, each, ui)
    if each:
        raise Refused(f"{target} is a plain directory: it has no commits to check one by one", "leave --each out, or apply to a new --dest and verify that")
    if not (target / "tests").is_dir():
        lock = state.installed_part(lock)
    upstream, laid = fetch(base, "auto", ui), import_directory(base, target, ui)
    with Git.scratch(upstream.git_dir, log=ui.git) as scratch:
        scratch.alternates = (*scratch.alternates, laid.git_dir / "objects")
        tree = scratch.text("rev-parse", f"{laid.commit}^{{tree}}")
        return _check(scratch, base, lock, found, upstream.commit, laid.commit, tree, [], each, ui)


def _check(git: Git, base: Base, lock: Lock, found: state.State, base_commit: str, head: str, tree: str, findings: list[Finding], each: bool, ui: Ui) -> Verified:
    contents: dict[str, bytes] = {}
    whole = GitTree(git, tree, contents)
    if found.kind == state.UNAPPLIED:
        findings.append(Finding(".", 1, f"the tree is upstream {base.tag}: no patch is applied"))
    locked = git.blobs(tree, sorted(lock.touched))
    findings += [Finding(p, 1, f"is {_name(locked.get(p))}, the lock says {_name(after)}") for p, (_, after) in sorted(lock.touched.items()) if locked.get(p) != after and found.kind != state.UNAPPLIED]
    if found.kind != state.UNAPPLIED and found.level is None and tree != lock.result_tree and not findings:
        findings.append(Finding(".", 1, f"the tree is {tree}, the lock says {lock.result_tree}"))
    lines = semantic.added_lines(git, base_commit, head)
    for path in lock.touched:  # compile every touched file, also those that only lost lines
        if path.endswith(".py") and whole.blob(path):
            lines.setdefault(path, set())
    findings += semantic.check(whole, lines)
    checked = [f"{len(lines)} touched and added Python files", f"{sum(map(len, lines.values()))} added lines"]
    if each:
        findings += _each_prefix(git, base_commit, head, contents, ui)
        checked.append("every prefix of the series")
    return Verified(base, found.level, tuple(dict.fromkeys(findings)), tuple(checked))


def _each_prefix(git: Git, base_commit: str, head: str, contents: dict[str, bytes], ui: Ui) -> list[Finding]:
    """The same checks after each commit of the stack, so that bisecting the tree works."""
    commits = git.text("rev-list", "--reverse", f"{base_commit}..{head}").split()
    overlay: set[str] = set()
    findings = []
    for number, commit in enumerate(commits):
        ui.progress("checking prefixes", number, len(commits))
        topic = git.text("log", "-1", "--format=%(trailers:key=Topic,valueonly)", commit).strip() or commit[:12]
        lines = semantic.added_lines(git, base_commit, commit)
        if number == 0 and topic == "overlay":
            # Nobody imports an overlay file before the patch that hooks it in: what it needs may come with later patches.
            overlay = set(lines)
        checked = {p: numbers for p, numbers in lines.items() if p not in overlay}
        findings += [Finding(f.path, f.line, f"{f.why} (after {topic})") for f in semantic.check(GitTree(git, commit, contents), checked)]
    ui.progress("checking prefixes", len(commits), len(commits))
    return findings


def _name(blob: str | None) -> str:
    return blob.split(" ")[1][:10] if blob else "absent"
