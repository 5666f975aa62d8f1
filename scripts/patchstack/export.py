# SPDX-License-Identifier: Apache-2.0
"""Edited commits back to patch files: proven by a round trip, or nothing is written.

A patch whose file still makes the same commit keeps its bytes. patches/<base>/ and vllm_overlay/ are changed file by file,
behind a journal in patches/ (change.py).
"""
import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from . import change, foreign, gitstate, inplace, journal, stack, workspace, worktree
from .change import Edit
from .committer import Committer
from .disk import FILE, Disk
from .errors import Conflict, Refused, Usage
from .git import Git
from .lock import load_lock
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
DESK = ".patchstack"  # in patches/


@dataclass(frozen=True)
class Export:
    """What an export would write. `head`: the commit it is made of. `changed`/`new`/`dropped`: topics. `series_text`: the new series file."""

    base: Base
    head: str
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
    recorded = git.resolve(f"{gitstate.BASE_REF}^{{commit}}")
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
        raise Refused(f"{target} has a merge commit, {merges[0][:12]}: a stack is a straight line", f"git -C {target} rebase {gitstate.BASE_REF}")
    topics: list[tuple[str, str]] = []
    overlay_paths = set(base.overlay)
    for commit in git.text("rev-list", "--reverse", f"{base_commit}..HEAD").split():
        subject = git.text("log", "-1", "--format=%s", commit)
        topic = git.text("log", "-1", "--format=%(trailers:key=Topic,valueonly)", commit).strip()
        paths = set(git.text("diff-tree", "--no-commit-id", "--name-only", "-r", "-z", "--no-renames", commit).split("\0")) - {""}
        where = f"commit {commit[:12]} ({subject})"
        if subject.startswith(("fixup! ", "squash! ", "amend! ")):
            raise Refused(f"{where} is not squashed yet", f"git -C {target} rebase -i --autosquash {gitstate.BASE_REF}")
        if topic == stack.OVERLAY_TOPIC:
            if stray := sorted(paths - overlay_paths):
                raise Refused(f"{where} changes {', '.join(stray)}, which {base.folder / 'base.toml'} does not list as overlay", "list them there (new files), or move that change to a commit of its topic")
            continue
        if not TOPIC.fullmatch(topic):
            raise Refused(f"{where} has no usable `Topic:` trailer (found {topic!r})", "add one with `git commit --amend` or a rebase; it names the patch file")
        if both := sorted(paths & overlay_paths):
            raise Refused(f"{where} changes overlay files ({', '.join(both)})", f"put that change into a commit with the trailer `Topic: {stack.OVERLAY_TOPIC}`")
        if topic in (t for t, _ in topics):
            raise Refused(f"two commits have the topic {topic}: {where} is the second", f"squash them: git -C {target} rebase -i {gitstate.BASE_REF}")
        topics.append((topic, commit))
    overlay = {path: blob.stdout for path in base.overlay if (blob := git.try_run("cat-file", "blob", f"HEAD:{path}")).returncode == 0}
    return topics, overlay


def plan(target: pathlib.Path, base: Base, allow_drop: bool, ui: Ui) -> Export:
    """Work out an export of `target` and prove it, writing nothing but the cache. Raises Refused."""
    place = inplace.place_of(target)
    inplace.refuse_linked(place)
    if left := inplace.interrupted(place, ui.note):
        raise Refused(f"`{left.command}` in {target} was interrupted", "run it without --dry-run: that is finished or taken back first")
    lock = load_lock(base.folder) if (base.folder / "lock.json").exists() else None
    upstream = None if lock else fetch(base, "auto", ui)
    pinned_tree = lock.base_tree if lock else Git(upstream.git_dir, git_dir=upstream.git_dir).tree_of(upstream.commit)
    with foreign.opened(place, ui.git) as git:
        seen = worktree.glance(target, git, ())
        if seen is None:
            raise Refused(f"{target} has no commit", f"python apply.py apply --ref {base.tag} --dest NEW_DIRECTORY")
        inplace.refuse_dirty(target, seen)
        base_commit = find_base_commit(git, base, pinned_tree, target)
        topics, overlay = _commits(git, base, base_commit, target)
    missing_overlay = [p for p in base.overlay if p not in overlay]
    if missing_overlay and overlay:
        raise Refused(f"{target} lacks the overlay files {', '.join(missing_overlay)}", f"restore them, or take them out of {base.folder / 'base.toml'}")
    old_series = load_series(base.folder) if (base.folder / "series").exists() else Series(base.folder / "series", (), {}, "")
    dropped = tuple(t for t in old_series.patches if t not in dict(topics))
    if dropped and not allow_drop:
        raise Refused(f"the export would drop {', '.join(dropped)}: {target} has no commit with that topic", "give --allow-drop if that is meant")

    with Git.scratch(place.common_dir, log=ui.git) as scratch:
        patches = tuple(_patch_files(scratch, base, base_commit, overlay, topics))
        for patch in patches:
            refuse_unsafe(patch)
        laid = overlay or overlay_files(base)
        built = stack.build(scratch, base_commit, patches, laid if overlay else {})
        if built.tree != seen.tree:
            differ = scratch.text("diff-tree", "-r", "--name-only", built.tree, seen.tree).splitlines()
            raise Refused(f"the round trip failed: the exported patches give another tree than HEAD ({', '.join(differ[:6])}); nothing was written", "report it with `-v`")
    text = rewrite_series(old_series.text, [p.topic for p in patches])
    files = stack.StackFiles(base, parse_series(text, base.folder / "series"), patches, laid)
    lock_text = _lock_text(place, files, base_commit, pinned_tree, upstream, ui)
    on_disk = {p: (base.overlay_root / p).read_bytes() if (base.overlay_root / p).is_file() else None for p in overlay}
    old = set(old_series.patches)
    return Export(base, seen.head, patches, text, {p: data for p, data in overlay.items() if on_disk[p] != data},
                  tuple(p.topic for p in patches if p.topic in old and p.data != p.path.read_bytes()), tuple(p.topic for p in patches if p.topic not in old), dropped, lock_text)  # fmt: skip


def _patch_files(scratch: Git, base: Base, base_commit: str, overlay: dict[str, bytes], topics: list[tuple[str, str]]) -> Iterable[PatchFile]:
    """One patch file per commit; the present file where it still makes the very same commit."""
    rendered = [(topic, commit, render(scratch, commit, base.folder / f"{topic}.patch")) for topic, commit in topics]
    kept = {topic: read_patch(patch.path) for topic, _, patch in rendered if patch.path.exists()}
    tip = stack.start(scratch, base_commit, sorted({path for patch in (*kept.values(), *(p for _, _, p in rendered)) for path in patch.paths}), overlay)
    if overlay:
        with Committer(scratch) as committer:
            tip = stack.add_overlay(committer, tip, overlay)
    for topic, commit, patch in rendered:
        made = _commit_alone(scratch, tip, patch)
        if made is None or _said(scratch, commit) != _said(scratch, made.commit):
            raise Refused(f"the message or author of commit {commit[:12]} ({patch.subject}) would not survive in {patch.path.name}: git ends a message at a line that "
                          "begins with `---`, `diff -` or `Index: `, and takes a first line `From:`, `Date:` or `Subject:` for a header",
                          "reword it (`git commit --amend`, or `git rebase -i`), for example by indenting that line")  # fmt: skip
        same = _commit_alone(scratch, tip, kept[topic]) if topic in kept else None
        yield kept[topic] if same and same.commit == made.commit else patch
        tip = made


def _commit_alone(scratch: Git, tip: stack.Tip, patch: PatchFile) -> stack.Tip | None:
    """What a patch makes of `tip`; None if it does not apply, or is no patch (the message was taken for a diff)."""
    with workspace.temporary() as folder:
        (mail,) = stack.read_mails(scratch, [patch], folder)
        try:
            listed = stack.apply_patch(stack.index_at(scratch, tip, folder / "index"), mail)
        except (Conflict, Refused):
            return None
        with Committer(scratch) as committer:
            return stack.commit_patch(committer, tip, mail, listed)


def _said(git: Git, commit: str) -> list[str]:
    """Author, date and message of a commit, without the blanks that git takes out of messages."""
    return [line.rstrip() for line in git.text("log", "-1", "--format=%an%n%ae%n%ad%n%s%n%b", "--date=raw", commit).split("\n") if line.strip()]


def _lock_text(place: foreign.Place, files: stack.StackFiles, base_commit: str, pinned_tree: str, upstream, ui: Ui) -> str:
    """The lock, always made on the pinned sdist's tree, whatever the source of the edited tree was."""
    git_dir, commit = place.common_dir, base_commit
    if upstream is None:
        with Git.scratch(git_dir, log=ui.git) as scratch:
            if scratch.tree_of(base_commit) != pinned_tree:
                upstream = fetch(files.base, "auto", ui)
    if upstream is not None:
        git_dir, commit = upstream.git_dir, upstream.commit
    with Git.scratch(git_dir, log=ui.git) as scratch:
        built = stack.build(scratch, commit, files.patches, files.overlay)
        return stack.make_lock(scratch, files, built).dump()


@contextlib.contextmanager
def held(folder: pathlib.Path, note: Callable[[str], None]) -> Iterator[journal.Desk]:
    """Hold patches/ (`folder`) against other exports; first finish or take back what a killed one left, and say so."""
    with journal.desk(folder, DESK, note) as desk:
        if done := change.recover(desk, folder.parent, change.Finish()):
            note(f"{folder}: {done}")
        yield desk


def interrupted(folder: pathlib.Path, note: Callable[[str], None]) -> journal.Journal | None:
    """What a killed export left half-done in patches/, changing nothing."""
    return journal.left_in(folder, DESK, note)


def fingerprint(base: Base) -> dict[str, bytes | None]:
    """Everything that an export reads of patches/<base>/ and vllm_overlay/, and may write."""
    there = {str(path): path.read_bytes() for path in sorted(base.folder.iterdir()) if path.is_file()}
    return there | {path: file.read_bytes() if (file := base.overlay_root / path).is_file() else None for path in base.overlay}


def write(export: Export, desk: journal.Desk) -> None:
    """Put the planned files in place, or none of them. A file of ours that is there already keeps its permissions."""
    folder = export.base.folder
    root = folder.parent.parent
    wanted: dict[pathlib.Path, bytes | None] = {export.base.overlay_root / path: data for path, data in export.overlay_changed.items()}
    wanted |= {folder / f"{topic}.patch": None for topic in export.dropped} | {patch.path: patch.data for patch in export.patches}
    wanted |= {folder / "series": export.series_text.encode(), folder / "lock.json": export.lock_text.encode()}
    disk, edits = Disk(root), []
    for path, data in wanted.items():
        name = str(path.relative_to(root))
        there = disk.read(name)
        if (there[1] if there else None) != data:
            edits.append(Edit(name, disk.blob(name), None if data is None else (there[0] if there else FILE, data)))
    change.run(desk, root, "export", edits, change.Finish())


def finish_tree(target: pathlib.Path, ui: Ui) -> None:
    """Finish or take back what a killed run left in the tree to export."""
    place = inplace.place_of(target)
    if inplace.interrupted(place, ui.note):
        with foreign.opened(place, ui.git) as git, inplace.held(place, git, ui):
            pass


def record(export: Export, target: pathlib.Path, ui: Ui) -> None:
    """Note that what the tree holds is saved: `unapply` may drop it. Also for a run that finds the work of a killed one done."""
    place = inplace.place_of(target)
    with foreign.opened(place, ui.git) as git:
        recorded = gitstate.records_of(git).get(gitstate.APPLIED_REF)
        if recorded == export.head or git.resolve("HEAD^{commit}") != export.head:  # somebody has committed more
            inplace.tidy(place, ui.note)
            return
        with inplace.held(place, git, ui) as desk:
            head = gitstate.head_of(git)
            move = gitstate.Move("export", {}, {gitstate.APPLIED_REF: (recorded, export.head)}, (head, head), {}, gitstate.owners_of(place))
            change.run(desk, place.top, "export", [], gitstate.Mover(git, place, desk.folder, move, ui.note), git=move.record())


def choose_base(target: pathlib.Path, named: str | None, bases: list[Base], ui: Ui) -> Base:
    """The base that `target` was applied from, or the one named with --base."""
    place = inplace.place_of(target)
    inplace.refuse_linked(place)
    with foreign.opened(place, ui.git) as git:
        recorded = gitstate.settings_of(git, place).get(gitstate.TAG_KEY)
    tag = named or recorded
    found = next((b for b in bases if tag in (b.tag, b.version)), None)
    if found is None:
        raise Usage(f"cannot tell the base of {target}" if not tag else f"{tag!r} is not a base under patches/", f"give --base, one of {', '.join(b.tag for b in bases)}")
    if named and recorded and recorded != found.tag:
        raise Refused(f"{target} was applied from {recorded}, not {found.tag}")
    return found
