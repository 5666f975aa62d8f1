# SPDX-License-Identifier: Apache-2.0
"""Edited commits back to patch files: proven by a round trip, or nothing is written.

A patch whose file still makes the same commit keeps its bytes. The new patches/<base>/ is put in place in one step.
"""
import os
import pathlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from . import files as fs
from . import place, stack
from .errors import Conflict, Refused, Usage
from .git import Git
from .lock import load_lock, write_atomic
from .overlay import overlay_files
from .patchfile import PatchFile, parse_patch, read_patch, refuse_unsafe
from .pins import Base
from .report import Ui
from .series import TOPIC, Series, load_series, parse_series, rewrite_series
from .upstream import fetch

_FORMAT = ("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-stat", "--full-index", "--no-renames", "--no-thread",
           "--no-attach", "--no-base", "--no-cover-letter", "--no-numbered", "--subject-prefix=PATCH", "--encode-email-headers", "--no-signoff",
           "--no-notes", "--no-ext-diff", "--no-textconv", "--no-color", "--diff-algorithm=myers", "--unified=3", "--inter-hunk-context=0",
           "--src-prefix=a/", "--dst-prefix=b/", "--indent-heuristic", "--no-to", "--no-cc", "--no-add-header")  # fmt: skip


@dataclass(frozen=True)
class Export:
    """What an export would write. `changed`/`new`/`dropped`: topics. `series_text`: the new series file."""

    base: Base
    patches: tuple[PatchFile, ...]
    series_text: str
    overlay_changed: dict[str, bytes]
    changed: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    lock_text: str

    @property
    def anything(self) -> bool:
        return bool(self.changed or self.new or self.dropped or self.overlay_changed or self._text_differs("series", self.series_text) or self._text_differs("lock.json", self.lock_text))

    def _text_differs(self, name: str, text: str) -> bool:
        path = self.base.folder / name
        return not path.exists() or path.read_text(encoding="utf-8") != text


def render(git: Git, commit: str, path: pathlib.Path) -> PatchFile:
    """The patch file of one commit, as this project keeps it. `git` is a scratch repository: no local configuration applies."""
    return parse_patch(git.run(*_FORMAT, commit), path)


def find_base_commit(git: Git, base: Base, base_tree: str | None, target: pathlib.Path) -> str:
    """Where the stack starts in `target`: the recorded commit, else the newest ancestor of HEAD with the pinned tree."""
    recorded = git.resolve(f"{place.BASE_REF}^{{commit}}")
    if recorded:
        return recorded
    for line in git.text("log", "--first-parent", "--format=%H %T", "HEAD").splitlines():
        commit, tree = line.split()
        if tree == base_tree or base.is_commit(commit):
            return commit
    raise Refused(f"no commit below HEAD in {target} is {base.tag} (commit {base.commit})", f"apply to a new tree: python apply.py apply --ref {base.tag} --dest NEW_DIRECTORY")


def _commits(git: Git, base: Base, base_commit: str, target: pathlib.Path) -> tuple[list[tuple[str, str]], dict[str, bytes]]:
    """([(topic, commit)] oldest first, overlay files as they are at HEAD). Raises Refused on a history that is no stack."""
    if not git.ok("merge-base", "--is-ancestor", base_commit, "HEAD"):
        raise Refused(f"HEAD of {target} is not on top of the recorded base {base_commit[:12]}", "rebase your commits onto it with git, then export again")
    if merges := git.text("rev-list", "--min-parents=2", f"{base_commit}..HEAD").split():
        raise Refused(f"{target} has a merge commit, {merges[0][:12]}: a stack is a straight line", f"git -C {target} rebase {place.BASE_REF}")
    topics: list[tuple[str, str]] = []
    overlay_paths = set(base.overlay)
    for commit in git.text("rev-list", "--reverse", f"{base_commit}..HEAD").split():
        subject = git.text("log", "-1", "--format=%s", commit)
        topic = git.text("log", "-1", "--format=%(trailers:key=Topic,valueonly)", commit).strip()
        paths = set(git.text("diff-tree", "--no-commit-id", "--name-only", "-r", "-z", "--no-renames", commit).split("\0")) - {""}
        where = f"commit {commit[:12]} ({subject})"
        if subject.startswith(("fixup! ", "squash! ", "amend! ")):
            raise Refused(f"{where} is not squashed yet", f"git -C {target} rebase -i --autosquash {place.BASE_REF}")
        if topic == stack.OVERLAY_TOPIC:
            if stray := sorted(paths - overlay_paths):
                raise Refused(f"{where} changes {', '.join(stray)}, which {base.folder / 'base.toml'} does not list as overlay", "list them there (new files), or move that change to a commit of its topic")
            continue
        if not TOPIC.fullmatch(topic):
            raise Refused(f"{where} has no usable `Topic:` trailer (found {topic!r})", "add one with `git commit --amend` or a rebase; it names the patch file")
        if both := sorted(paths & overlay_paths):
            raise Refused(f"{where} changes overlay files ({', '.join(both)})", f"put that change into a commit with the trailer `Topic: {stack.OVERLAY_TOPIC}`")
        if topic in (t for t, _ in topics):
            raise Refused(f"two commits have the topic {topic}: {where} is the second", f"squash them: git -C {target} rebase -i {place.BASE_REF}")
        topics.append((topic, commit))
    overlay = {path: blob.stdout for path in base.overlay if (blob := git.try_run("cat-file", "blob", f"HEAD:{path}")).returncode == 0}
    return topics, overlay


def plan(target: pathlib.Path, base: Base, allow_drop: bool, ui: Ui) -> Export:
    """Work out an export of `target` and prove it, writing nothing but the cache. Raises Refused."""
    git = place.repository_of(target, ui)
    place.refuse_dirty(git, target, set())
    lock = load_lock(base.folder) if (base.folder / "lock.json").exists() else None
    upstream = None if lock else fetch(base, "auto", ui)
    pinned_tree = lock.base_tree if lock else Git(upstream.git_dir, git_dir=upstream.git_dir).text("rev-parse", f"{upstream.commit}^{{tree}}")
    base_commit = find_base_commit(git, base, pinned_tree, target)
    topics, overlay = _commits(git, base, base_commit, target)
    missing_overlay = [p for p in base.overlay if p not in overlay]
    if missing_overlay and overlay:
        raise Refused(f"{target} lacks the overlay files {', '.join(missing_overlay)}", f"restore them, or take them out of {base.folder / 'base.toml'}")
    old_series = load_series(base.folder) if (base.folder / "series").exists() else Series(base.folder / "series", (), {}, "")
    dropped = tuple(t for t in old_series.patches if t not in dict(topics))
    if dropped and not allow_drop:
        raise Refused(f"the export would drop {', '.join(dropped)}: {target} has no commit with that topic", "give --allow-drop if that is meant")

    with Git.scratch(git.git_dir, log=ui.git) as scratch:
        patches = tuple(_patch_files(scratch, base, base_commit, overlay, topics))
        for patch in patches:
            refuse_unsafe(patch)
        laid = overlay or overlay_files(base)
        built = stack.build(scratch, base_commit, patches, laid if overlay else {})
        head_tree = git.text("rev-parse", "HEAD^{tree}")
        if built.tree != head_tree:
            differ = scratch.text("diff-tree", "-r", "--name-only", built.tree, head_tree).splitlines()
            raise Refused(f"the round trip failed: the exported patches give another tree than HEAD ({', '.join(differ[:6])}); nothing was written", "report it with `-v`")
    text = rewrite_series(old_series.text, [p.topic for p in patches])
    files = stack.StackFiles(base, parse_series(text, base.folder / "series"), patches, laid)
    lock_text = _lock_text(git, files, base_commit, pinned_tree, upstream, ui)
    on_disk = {p: (base.overlay_root / p).read_bytes() if (base.overlay_root / p).is_file() else None for p in overlay}
    old = set(old_series.patches)
    return Export(base, patches, text, {p: data for p, data in overlay.items() if on_disk[p] != data},
                  tuple(p.topic for p in patches if p.topic in old and p.data != p.path.read_bytes()), tuple(p.topic for p in patches if p.topic not in old), dropped, lock_text)  # fmt: skip


def _patch_files(scratch: Git, base: Base, base_commit: str, overlay: dict[str, bytes], topics: list[tuple[str, str]]) -> Iterable[PatchFile]:
    """One patch file per commit; the present file where it still makes the very same commit."""
    index = scratch.with_index(scratch.git_dir / "export-index")
    index.run("read-tree", base_commit)
    parent = stack.commit_overlay(index, base_commit, f"{base_commit}^{{tree}}", overlay)[0] if overlay else base_commit
    for topic, commit in topics:
        path = base.folder / f"{topic}.patch"
        patch = render(scratch, commit, path)
        index.run("read-tree", parent)
        try:
            made, _ = stack.commit_patch(index, parent, patch)
        except Conflict:  # the message was taken for a diff
            made = None
        if made is None or _said(scratch, commit) != _said(scratch, made):
            raise Refused(f"the message or author of commit {commit[:12]} ({patch.subject}) would not survive in {path.name}: git ends a message at a line that "
                          "begins with `---`, `diff -` or `Index: `, and takes a first line `From:`, `Date:` or `Subject:` for a header",
                          "reword it (`git commit --amend`, or `git rebase -i`), for example by indenting that line")  # fmt: skip
        if path.exists():
            kept = read_patch(path)
            index.run("read-tree", parent)
            try:
                if stack.commit_patch(index, parent, kept)[0] == made:
                    patch = kept
            except Conflict:
                pass  # the old file no longer applies here: it is replaced
        yield patch
        parent = made


def _said(git: Git, commit: str) -> list[str]:
    """Author, date and message of a commit, without the blanks that git takes out of messages."""
    return [line.rstrip() for line in git.text("log", "-1", "--format=%an%n%ae%n%ad%n%s%n%b", "--date=raw", commit).split("\n") if line.strip()]


def _lock_text(git: Git, files: stack.StackFiles, base_commit: str, pinned_tree: str, upstream, ui: Ui) -> str:
    """The lock, always made on the pinned sdist's tree, whatever the source of the edited tree was."""
    objects, commit = git.git_dir, base_commit
    if upstream is None and git.text("rev-parse", f"{base_commit}^{{tree}}") != pinned_tree:
        upstream = fetch(files.base, "auto", ui)
    if upstream is not None:
        objects, commit = upstream.git_dir, upstream.commit
    with Git.scratch(objects, log=ui.git) as scratch:
        built = stack.build(scratch, commit, files.patches, files.overlay)
        return stack.make_lock(scratch, files, built).dump()


def write(export: Export, target: pathlib.Path, ui: Ui) -> None:
    """Put the planned files in place: overlay files one by one, then the whole of patches/<base>/ in one step."""
    folder = export.base.folder
    with fs.locked(folder.parent, ui.note), fs.scratch_beside(folder) as scratch:
        for path, data in export.overlay_changed.items():
            write_atomic(export.base.overlay_root / path, data)
        new = scratch / "new"
        shutil.copytree(folder, new)
        for topic in export.dropped:
            (new / f"{topic}.patch").unlink(missing_ok=True)
        for patch in export.patches:
            (new / patch.path.name).write_bytes(patch.data)
        (new / "series").write_text(export.series_text, encoding="utf-8")
        (new / "lock.json").write_text(export.lock_text, encoding="utf-8")
        for file in new.iterdir():
            os.chmod(file, 0o644)
        fs.exchange(new, folder)
    record(export, target, ui)


def record(export: Export, target: pathlib.Path, ui: Ui) -> None:
    """Note that what the tree holds is saved: `unapply` may drop it. Also for a run that finds the work of a killed one done."""
    fs.clear_scratch(export.base.folder, ui.note)
    git = place.repository_of(target, ui)
    if git.resolve(place.APPLIED_REF) != git.text("rev-parse", "HEAD"):
        git.run("update-ref", place.APPLIED_REF, "HEAD")


def choose_base(target: pathlib.Path, named: str | None, bases: list[Base], ui: Ui) -> Base:
    """The base that `target` was applied from, or the one named with --base."""
    git = place.repository_of(target, ui)
    recorded = git.text("config", "--default", "", "patchstack.tag")
    tag = named or recorded
    found = next((b for b in bases if tag in (b.tag, b.version)), None)
    if found is None:
        raise Usage(f"cannot tell the base of {target}" if not tag else f"{tag!r} is not a base under patches/", f"give --base, one of {', '.join(b.tag for b in bases)}")
    if named and recorded and recorded != found.tag:
        raise Refused(f"{target} was applied from {recorded}, not {found.tag}")
    return found
