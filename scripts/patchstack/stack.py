# SPDX-License-Identifier: Apache-2.0
"""Turn a base commit and a series into commits, checked against the lock. Objects only: no work tree is touched, no ref is moved.

The overlay is laid down by one first commit, so that every later commit imports; each patch then becomes the commit that
`git am --keep-non-patch --committer-date-is-author-date` would make. The same input gives the same commit ids anywhere and
at any time.
"""
import pathlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import Conflict, Refused
from .git import Git
from .lock import Lock, LockedPatch
from .overlay import blob_id, overlay_files
from .patchfile import PatchFile, explain_failure, read_patch, refuse_unsafe
from .pins import Base
from .report import Ui
from .series import Series, load_series

OVERLAY_SUBJECT = "[Overlay] vllm-dcp-stack files"
OVERLAY_TOPIC = "overlay"
_OVERLAY_DATE = "1767225600 +0000"  # 2026-01-01: fixed, so that the commit id depends on content alone


@dataclass(frozen=True)
class StackFiles:
    """What patches/<base>/ and vllm_overlay/ say, read once."""

    base: Base
    series: Series
    patches: tuple[PatchFile, ...]
    overlay: dict[str, bytes]


@dataclass(frozen=True)
class Built:
    """`steps`: (topic, commit, tree) after each patch, overlay included. `commit`/`tree`: the end."""

    base_commit: str
    base_tree: str
    steps: tuple[tuple[str, str, str], ...]
    commit: str
    tree: str


def read_stack(base: Base) -> StackFiles:
    """Read and check the stack of `base`. Raises Usage or Refused."""
    series = load_series(base.folder)
    patches = tuple(read_patch(base.folder / f"{topic}.patch") for topic in series.patches)
    for patch in patches:
        refuse_unsafe(patch)
    return StackFiles(base, series, patches, overlay_files(base))


def commit_patch(git: Git, parent: str, patch: PatchFile) -> tuple[str, str]:
    """Apply one patch on `parent` in the (scratch) index of `git`; return (commit, tree). The index must hold `parent`'s tree.

    Raises Conflict when the patch does not apply: offsets are allowed, fuzz and 3-way are not.
    """
    with tempfile.TemporaryDirectory() as folder:
        message_file, diff_file = pathlib.Path(folder, "message"), pathlib.Path(folder, "diff")
        info = git.text("mailinfo", "-b", "--encoding=UTF-8", "--no-scissors", str(message_file), str(diff_file), input=patch.data)
        fields = dict(line.split(": ", 1) for line in info.splitlines() if ": " in line)
        missing = {"Author", "Email", "Date", "Subject"} - fields.keys()
        if missing:
            raise Refused(f"{patch.path}: the header lacks {', '.join(sorted(missing))}", "write it with `apply.py export`")
        message = fields["Subject"].encode("utf-8", "surrogateescape") + b"\n\n" + message_file.read_bytes()
        done = git.try_run("apply", "--cached", "--whitespace=nowarn", str(diff_file))
    if done.returncode:
        stderr = done.stderr.decode("utf-8", "replace")
        raise Conflict(explain_failure(patch, stderr, lambda path: _lines_of(git, parent, path)),
                       "check that the tree is the pinned base (`apply.py status`); after an upstream change, edit the patch in a tree and `apply.py export` it")  # fmt: skip
    tree = git.text("write-tree")
    date = fields["Date"]
    author = {"GIT_AUTHOR_NAME": fields["Author"], "GIT_AUTHOR_EMAIL": fields["Email"], "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    return git.text("commit-tree", tree, "-p", parent, "-F", "-", input=git.run("stripspace", input=message), env=author), tree


def _lines_of(git: Git, commit: str, path: str) -> list[str] | None:
    done = git.try_run("cat-file", "blob", f"{commit}:{path}")
    return done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else None


def commit_overlay(git: Git, parent: str, parent_tree: str, overlay: dict[str, bytes]) -> tuple[str, str]:
    """Add the overlay files on `parent`; return (commit, tree). Raises Refused if upstream has such a file already."""
    taken = git.blobs(parent_tree, sorted(overlay))
    if taken:
        raise Refused("the overlay would replace files that upstream already has: " + ", ".join(sorted(taken)),
                      "rename the overlay file, or turn it into a patch of the file that upstream has now")  # fmt: skip
    ids = [git.text("hash-object", "-w", "--stdin", input=data) for data in overlay.values()]
    records = "".join(f"100644 {oid}\t{path}\0" for path, oid in zip(overlay, ids, strict=True))
    git.run("update-index", "-z", "--index-info", input=records.encode())
    tree = git.text("write-tree")
    dates = {"GIT_AUTHOR_DATE": _OVERLAY_DATE, "GIT_COMMITTER_DATE": _OVERLAY_DATE}
    message = f"{OVERLAY_SUBJECT}\n\nWhole new files of the stack, kept in vllm_overlay/ and not as a patch.\n\nTopic: {OVERLAY_TOPIC}\n"
    return git.text("commit-tree", tree, "-p", parent, "-F", "-", input=message.encode(), env=dates), tree


def build(git: Git, base_commit: str, patches: Sequence[PatchFile], overlay: dict[str, bytes], ui: Ui | None = None) -> Built:
    """Commit the overlay and then every patch on `base_commit`. Writes objects and one scratch index only."""
    base_tree = git.text("rev-parse", f"{base_commit}^{{tree}}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = git.with_index(pathlib.Path(folder, "index"))
        scratch.run("read-tree", base_commit)
        commit, tree, steps = base_commit, base_tree, []
        if overlay:
            commit, tree = commit_overlay(scratch, commit, tree, overlay)
        for number, patch in enumerate(patches):
            if ui:
                ui.progress("applying patches", number, len(patches))
            commit, tree = commit_patch(scratch, commit, patch)
            steps.append((patch.topic, commit, tree))
        if ui and patches:
            ui.progress("applying patches", len(patches), len(patches))
    return Built(base_commit, base_tree, tuple(steps), commit, tree)


def make_lock(git: Git, files: StackFiles, built: Built) -> Lock:
    """The lock that describes `built`."""
    paths = touched_paths(files)
    before, after = git.blobs(built.base_tree, paths), git.blobs(built.tree, paths)
    patches = tuple(LockedPatch(p.topic, p.sha256, patch_id(git, p), tree, commit) for p, (_, commit, tree) in zip(files.patches, built.steps, strict=True))
    return Lock(built.base_tree, patches, {p: after[p] for p in files.overlay}, {p: (before.get(p), after.get(p)) for p in paths}, built.tree, built.commit)


def patch_id(git: Git, patch: PatchFile) -> str:
    """`git patch-id --stable` of a patch file."""
    return git.text("patch-id", "--stable", input=patch.data).split(" ")[0]


def touched_paths(files: StackFiles) -> list[str]:
    """Every path that a patch touches or the overlay brings, sorted."""
    return sorted({path for patch in files.patches for path in patch.paths} | files.overlay.keys())


def check_inputs(files: StackFiles, lock: Lock) -> None:
    """Refuse a stack whose patch or overlay files are not the locked ones, naming each."""
    ours = [p.topic for p in files.patches]
    locked = [p.topic for p in lock.patches]
    wrong = []
    if ours != locked:
        wrong.append(f"{files.series.path} lists {ours}, the lock {locked}")
    wrong += [f"{p.path} has sha256 {p.sha256}, the lock {q.sha256}" for p, q in zip(files.patches, lock.patches, strict=False) if p.topic == q.topic and p.sha256 != q.sha256]
    overlay = {path: f"100644 {blob_id(data)}" for path, data in files.overlay.items()}
    wrong += [f"vllm_overlay/{p}: the file is {overlay.get(p, 'absent')}, the lock says {lock.overlay.get(p, 'absent')}"
              for p in sorted(overlay.keys() | lock.overlay.keys()) if overlay.get(p) != lock.overlay.get(p)]  # fmt: skip
    if wrong:
        raise Refused(f"{files.base.folder / 'lock.json'} does not describe these files:\n" + "\n".join(f"- {w}" for w in wrong),
                      "if the change is meant, write the lock with `apply.py export DIR`; else restore the files from version control")  # fmt: skip


def check_base(git: Git, base: Base, lock: Lock, commit: str, where: str) -> str:
    """`exact` if the tree of `commit` is the locked one, `touched` if every touched path is. Raises Refused: another base."""
    tree = git.text("rev-parse", f"{commit}^{{tree}}")
    if tree == lock.base_tree:
        return "exact"
    found = git.blobs(tree, sorted(lock.touched))
    wrong = [(path, before, found.get(path)) for path, (before, _) in sorted(lock.touched.items()) if found.get(path) != before]
    if wrong or not lock.touched:
        shown = "\n".join(f"- {path}: expected {_short(before)}, found {_short(got)}" for path, before, got in wrong[:8])
        more = f"\n- and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Refused(f"{where} is not {base.tag} (commit {base.commit}): {len(wrong)} of {len(lock.touched)} files that the stack touches differ\n{shown}{more}",
                      "use the source of the pinned release, or see `apply.py bases` for the others")  # fmt: skip
    return "touched"


def _short(blob: str | None) -> str:
    return re.sub(r"^(\d+) ([0-9a-f]{10}).*", r"\2", blob) if blob else "no such file"


def check_result(git: Git, lock: Lock, built: Built, level: str) -> None:
    """Refuse a result that is not the locked one."""
    if level == "exact":
        for (topic, _, tree), locked in zip(built.steps, lock.patches, strict=True):
            if tree != locked.post_tree:
                raise Refused(f"after {topic}.patch the tree is {tree}, the lock says {locked.post_tree}", "restore patches/ from version control")
        if built.tree != lock.result_tree:
            raise Refused(f"the patched tree is {built.tree}, the lock says {lock.result_tree}", "restore patches/ and vllm_overlay/ from version control")
    after = git.blobs(built.tree, sorted(lock.touched))
    wrong = [path for path, (_, want) in sorted(lock.touched.items()) if after.get(path) != want]
    if wrong:
        raise Refused("these files are not as the lock says: " + ", ".join(wrong), "restore patches/ and vllm_overlay/ from version control")
