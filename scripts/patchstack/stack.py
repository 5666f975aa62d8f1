# SPDX-License-Identifier: Apache-2.0
"""Turn a base commit and a series into commits, checked against the lock. Objects only: no work tree is touched, no ref is moved.

The overlay is laid down by one first commit, so that every later commit imports; each patch then becomes the commit that
`git am --keep-non-patch --committer-date-is-author-date` would make. The same input gives the same commit ids anywhere and
at any time. `git apply` works on an index of the paths that a patch names and no others; fast-import makes trees and commits.
"""
import pathlib
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from . import workspace
from .committer import Author, Committer
from .errors import Conflict, GitError, Refused, cannot_write
from .git import IDENTITY, Git, Started
from .lock import Lock, LockedPatch
from .overlay import blob_id, overlay_files
from .patchfile import PatchFile, explain_failure, read_patch, refuse_unsafe, refuse_unseen
from .pins import Base
from .report import Ui
from .series import Series, load_series

OVERLAY_SUBJECT = "[Overlay] vllm-dcp-stack files"
OVERLAY_TOPIC = "overlay"
_OVERLAY_DATE = "@1767225600 +0000"  # 2026-01-01: fixed, so that the commit id depends on content alone


@dataclass(frozen=True)
class StackFiles:
    """What patches/<base>/ and vllm_overlay/ say, read once."""

    base: Base
    series: Series
    patches: tuple[PatchFile, ...]
    overlay: dict[str, bytes]


@dataclass(frozen=True)
class Built:
    """`steps`: (topic, commit, tree) after each patch, overlay included. `commit`/`tree`: the end, with `files` (path -> mode and blob) of what patches and overlay name."""

    base_commit: str
    base_tree: str
    steps: tuple[tuple[str, str, str], ...]
    commit: str
    tree: str
    files: dict[str, str]


def converted(base: Base) -> str | None:
    """What to say if git gave the files of this project DOS line ends when it was cloned; None if it did not."""
    for path in sorted(base.folder.glob("*.patch")):
        with path.open("rb") as f:
            if f.readline().endswith(b"\r\n"):
                return f"{path} has DOS line ends: git converted the files of this project when it was cloned (core.autocrlf)"
    return None


def read_stack(base: Base) -> StackFiles:
    """Read and check the stack of `base`. Raises Usage or Refused."""
    if said := converted(base):
        raise Refused(said, "in this project: git config core.autocrlf false && git rm -r --cached --quiet . && git reset --hard")
    series = load_series(base.folder)
    patches = tuple(read_patch(base.folder / f"{topic}.patch") for topic in series.patches)
    for patch in patches:
        refuse_unsafe(patch)
    return StackFiles(base, series, patches, overlay_files(base))


@dataclass(frozen=True)
class Mail:
    """A patch as git reads it: `diff` is a file with what `git apply` gets."""

    patch: PatchFile
    author: Author
    message: bytes
    diff: pathlib.Path


def read_mails(git: Git, patches: Sequence[PatchFile], folder: pathlib.Path) -> list[Mail]:
    """Take patch files apart with git. `folder`: where the diffs go."""
    running, mails = [], []
    for number, patch in enumerate(patches):
        mail, message, diff = (folder / f"{number}.{kind}" for kind in ("mail", "message", "diff"))
        mail.write_bytes(patch.data)
        running.append((patch, message, diff, git.start("mailinfo", "-b", "--encoding=UTF-8", "--no-scissors", str(message), str(diff), stdin=mail)))
    for patch, message, diff, info in running:
        fields = dict(line.split(": ", 1) for line in info.text().splitlines() if ": " in line)
        missing = {"Author", "Email", "Date", "Subject"} - fields.keys()
        if missing:
            raise Refused(f"{patch.path}: the header lacks {', '.join(sorted(missing))}", "write it with `apply.py export`")
        text = fields["Subject"].encode("utf-8", "surrogateescape") + b"\n\n" + message.read_bytes()
        mails.append(Mail(patch, Author(fields["Author"], fields["Email"], fields["Date"]), text, diff))
    between = b"\1"
    while any(between in mail.message for mail in mails):
        between += b"\1"
    cleaned = git.run("stripspace", input=b"".join(b"%b\n%b\n" % (mail.message.rstrip(b"\n"), between) for mail in mails))  # all at once
    return [replace(mail, message=text) for mail, text in zip(mails, cleaned.split(between + b"\n"), strict=False)]


@dataclass(frozen=True)
class Tip:
    """Where a chain of commits is. `files`: `path -> "<mode> <blob id>"` of the paths that the chain is about."""

    commit: str
    tree: str
    files: dict[str, str]


def start(git: Git, commit: str, paths: Sequence[str], overlay: Iterable[str] = ()) -> Tip:
    """The chain that has nothing on `commit` yet. `paths`: all that patches to come may name. Raises Refused if upstream has an overlay file already."""
    tree = git.tree_of(commit)
    files = git.blobs(tree, sorted({*paths, *overlay}))
    if taken := sorted(files.keys() & set(overlay)):
        raise Refused("the overlay would replace files that upstream already has: " + ", ".join(taken),
                      "rename the overlay file, or turn it into a patch of the file that upstream has now")  # fmt: skip
    return Tip(commit, tree, files)


def index_at(git: Git, tip: Tip, file: pathlib.Path) -> Git:
    """`git` with a new index that holds the files of `tip` and no others."""
    file.unlink(missing_ok=True)
    index = git.with_index(file)
    index.run("update-index", "-z", "--index-info", input="".join(f"{blob}\t{path}\0" for path, blob in tip.files.items()).encode("utf-8", "surrogateescape"))
    return index


def apply_patch(index: Git, mail: Mail) -> Started:
    """Apply one patch to the index; return what lists it then.

    Raises Conflict when the patch does not apply: offsets are allowed, fuzz and 3-way are not. Refused when git sees other files in
    it than we do.
    """
    done = index.try_run("apply", "--cached", "--apply", "--whitespace=nowarn", "--numstat", "-z", str(mail.diff))
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace")
        if cannot_write(said):
            raise GitError(["git", "apply"], done.returncode, said)
        refuse_unseen(mail.patch, index.try_run("apply", "--numstat", "-z", str(mail.diff)).stdout)  # it may fail at what we do not see
        raise Conflict(explain_failure(mail.patch, said, lambda path: _lines_of(index, path)),
                       "check that the tree is the pinned base (`apply.py status`); after an upstream change, edit the patch in a tree and `apply.py export` it")  # fmt: skip
    refuse_unseen(mail.patch, done.stdout)
    copy = index.index_file.with_name(mail.diff.with_suffix(".index").name)  # the next patch may change the index before this is read
    shutil.copyfile(index.index_file, copy)
    return index.with_index(copy).start("ls-files", "--stage", "-z")


def commit_patch(committer: Committer, tip: Tip, mail: Mail, listed: Started) -> Tip:
    """Commit on `tip` what `apply_patch` made of it."""
    files = {record.split("\t", 1)[1]: record.split("\t")[0][:-2] for record in listed.text().split("\0") if record}  # without the stage
    changes = {path: files.get(path) for path in sorted(tip.files.keys() | files.keys()) if tip.files.get(path) != files.get(path)}
    commit, tree = committer.commit(tip.commit, mail.message, mail.author, changes)
    return Tip(commit, tree, files)


def _lines_of(index: Git, path: str) -> list[str] | None:
    done = index.try_run("cat-file", "blob", f":{path}")
    return done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else None


def add_overlay(committer: Committer, tip: Tip, overlay: dict[str, bytes]) -> Tip:
    """Commit the overlay files on `tip`, whose chain is not about them."""
    message = f"{OVERLAY_SUBJECT}\n\nWhole new files of the stack, kept in vllm_overlay/ and not as a patch.\n\nTopic: {OVERLAY_TOPIC}\n"
    commit, tree = committer.commit(tip.commit, message.encode(), Author(*IDENTITY, _OVERLAY_DATE), overlay)
    return Tip(commit, tree, tip.files)


def build(git: Git, base_commit: str, patches: Sequence[PatchFile], overlay: dict[str, bytes], ui: Ui | None = None) -> Built:
    """Commit the overlay and then every patch on `base_commit`. Writes objects only."""
    named = {path for patch in patches for path in patch.paths}
    if both := sorted(named & overlay.keys()):
        raise Refused(f"a patch changes overlay files: {', '.join(both)}", "change them in vllm_overlay/, and take that change out of the patch")
    steps = []
    with workspace.temporary() as folder, Committer(git) as committer:
        tip = start(git, base_commit, sorted(named), overlay)
        base_tree = tip.tree
        mails = read_mails(git, patches, folder)
        index, listed = index_at(git, tip, folder / "index"), []
        for number, mail in enumerate(mails):
            if ui:
                ui.progress("applying patches", number, len(mails))
            listed.append(apply_patch(index, mail))
        if ui and patches:
            ui.progress("applying patches", len(mails), len(mails))
        if overlay:
            tip = add_overlay(committer, tip, overlay)
        for mail, files in zip(mails, listed, strict=True):
            tip = commit_patch(committer, tip, mail, files)
            steps.append((mail.patch.topic, tip.commit, tip.tree))
    _refuse_more(git, base_tree, tip.tree, named | overlay.keys())
    return Built(base_commit, base_tree, tuple(steps), tip.commit, tip.tree, tip.files | {path: f"100644 {blob_id(data)}" for path, data in overlay.items()})


def _refuse_more(git: Git, before: str, after: str, named: set[str]) -> None:
    """Refuse a result that differs from the base in a path that nothing names: a new file stands where a folder was, or the other way round."""
    differ = set(git.text("diff-tree", "-r", "-z", "--name-only", "--no-renames", before, after).split("\0")) - {""}
    if more := sorted(differ - named):
        raise Refused(f"the stack would change {', '.join(more[:6])}, which no patch and no overlay file names", "a path of the stack is a folder upstream, or lies in what is a file there: rename it")


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
    tree = git.tree_of(commit)
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


def check_result(lock: Lock, built: Built, level: str) -> None:
    """Refuse a result that is not the locked one."""
    if level == "exact":
        for (topic, _, tree), locked in zip(built.steps, lock.patches, strict=True):
            if tree != locked.post_tree:
                raise Refused(f"after {topic}.patch the tree is {tree}, the lock says {locked.post_tree}", "restore patches/ from version control")
        if built.tree != lock.result_tree:
            raise Refused(f"the patched tree is {built.tree}, the lock says {lock.result_tree}", "restore patches/ and vllm_overlay/ from version control")
    wrong = [path for path, (_, want) in sorted(lock.touched.items()) if built.files.get(path) != want]
    if wrong:
        raise Refused("these files are not as the lock says: " + ", ".join(wrong), "restore patches/ and vllm_overlay/ from version control")
