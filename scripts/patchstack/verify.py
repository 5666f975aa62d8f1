# SPDX-License-Identifier: Apache-2.0
"""Check a patched tree: is it what the lock says, and does what we added fit the tree it landed in?

Everything is read from the disk: the files of the tree, and those that the added lines use. Objects of git that serve as the
other side of a comparison are hashed when they are read.
"""
import pathlib
from dataclasses import dataclass, replace

from . import foreign, inplace, installed, semantic, state, workspace
from .disk import Disk
from .errors import Refused
from .export import find_base_commit
from .git import Git
from .lock import Lock, load_lock
from .pins import Base
from .report import Ui
from .semantic import Finding
from .trees import DiskTree, GitTree, python_files
from .upstream import fetch


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
    if found.kind == state.INTERRUPTED:
        raise Refused(f"{target} is {found.kind}: {found.detail}", found.next_step)
    if found.base is None:
        raise Refused(f"{target} is not a tree of any pinned base: {found.detail}", found.next_step)
    lock = load_lock(found.base.folder)
    if found.seen is not None:
        return _verify_git(target, lock, found, each, ui)
    if each:
        raise Refused(f"{target} is a plain directory: it has no commits to check one by one", "leave --each out, or apply to a new --dest and verify that")
    return _verify_directory(target, lock, found, ui)


def _verify_git(target: pathlib.Path, lock: Lock, found: state.State, each: bool, ui: Ui) -> Verified:
    seen, place = found.seen, inplace.place_of(target)
    findings = [Finding(p, 1, "has a change that is not committed") for p in seen.dirty]
    with foreign.opened(place, ui.git) as git:
        base_commit = find_base_commit(git, found.base, lock.base_tree, target)
    with Git.scratch(place.common_dir, log=ui.git) as scratch:
        lines = semantic.added_lines(scratch, base_commit, seen.head)
        before = scratch.blobs(base_commit, sorted(lines))
        inplace.read_blobs(scratch, [blob.split(" ")[1] for blob in (*before.values(), *(seen.files[p] for p in lines))], target)
        done = _check(DiskTree(target, seen.files), Disk(target).blobs(lock.touched), lines, lock, found, findings)
        if each:
            more = _each_prefix(scratch, base_commit, seen.head, ui)
            done = replace(done, findings=tuple(dict.fromkeys((*done.findings, *more))), checked=(*done.checked, "every prefix of the series"))
    return done


def _verify_directory(target: pathlib.Path, lock: Lock, found: state.State, ui: Ui) -> Verified:
    """A plain directory or an installed package: the locked files of it, laid over upstream's, are what was added."""
    package = installed.find(target)
    if package:
        lock = installed.part(lock)
    blobs = installed.blobs(target, lock) if package else Disk(target).blobs(lock.touched)
    upstream = fetch(found.base, "auto", ui)
    with Git.scratch(upstream.git_dir, log=ui.git) as scratch, workspace.temporary() as folder:
        index = scratch.with_index(folder / "index")
        index.run("read-tree", upstream.commit)
        tree, lines = DiskTree(target, {**lock.touched, **dict.fromkeys(python_files(target))}), []
        for path in lock.touched:
            blob = blobs.get(path) if (blobs.get(path) or "").startswith(("100644 ", "100755 ")) else None
            oid = index.text("hash-object", "-w", "--stdin", input=tree.read(path)) if blob else "0" * 40
            lines.append(f"{blob.split(' ')[0] if blob else '0'} {oid}\t{path}\0")
        index.run("update-index", "-z", "--index-info", input="".join(lines).encode("utf-8", "surrogateescape"))
        return _check(tree, blobs, semantic.added_lines(scratch, upstream.commit, index.text("write-tree")), lock, found, [])


def _check(tree: DiskTree, there: dict[str, str | None], lines: dict[str, set[int]], lock: Lock, found: state.State, findings: list[Finding]) -> Verified:
    """`there`: the locked paths as they are on the disk. `lines`: the added lines of each file."""
    if found.kind == state.UNAPPLIED:
        findings.append(Finding(".", 1, f"the tree is upstream {found.base.tag}: no patch is applied"))
    else:
        findings += [Finding(p, 1, f"is {_name(there.get(p))}, the lock says {_name(after)}") for p, (_, after) in sorted(lock.touched.items()) if there.get(p) != after]
        if found.level is None and not findings and found.seen is not None:
            findings.append(Finding(".", 1, f"the tree is {found.seen.tree}, the lock says {lock.result_tree}"))
    lines = dict(lines)
    for path in lock.touched:  # compile every touched file, also those that only lost lines
        if path.endswith(".py") and tree.read(path) is not None:
            lines.setdefault(path, set())
    findings += semantic.check(tree, lines)
    checked = (f"{len(lines)} touched and added Python files", f"{sum(map(len, lines.values()))} added lines")
    return Verified(found.base, found.level, tuple(dict.fromkeys(findings)), checked)


def _each_prefix(git: Git, base_commit: str, head: str, ui: Ui) -> list[Finding]:
    """The same checks after each commit of the stack, so that bisecting the tree works."""
    commits = git.text("rev-list", "--reverse", f"{base_commit}..{head}").split()
    overlay: set[str] = set()
    findings: list[Finding] = []
    contents: dict[str, bytes] = {}
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
    return blob.split(" ")[-1][:10] if blob else "absent"
