# SPDX-License-Identifier: Apache-2.0
"""Carry the stack to another release, commit by commit, with git's own 3-way merge and recorded resolutions (rerere).

The work tree lies at build/rebase-<tag> of the project. What is done is read from its commits (`Topic:` trailers), so a
killed run loses at most the patch it was on; state.json in its .git keeps what commits cannot say: where from, and which
topics were skipped. Resolutions are kept in rerere/ of the project. patches/<tag>/ appears in one step at the end.
"""
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from dataclasses import dataclass, replace

from . import cache, export, files, foreign, inplace, stack, workspace, worktree
from .drift import UPSTREAM, PatchDrift, analyse, declared, numbers, pull_requests, where_did_it_go
from .errors import Conflict, Refused, Usage
from .git import Git
from .lock import write_atomic
from .pins import Base
from .releases import Release
from .report import Ui
from .series import load_series
from .upstream import Upstream, downloaded

_MERGE = ("-c", "rerere.enabled=true", "-c", "rerere.autoUpdate=true", "-c", "merge.renames=true", "-c", "diff.renames=true")
_NEW, _OLD, _OLD_BASE = "refs/patchstack/base", "refs/patchstack/old", "refs/patchstack/old-base"


@dataclass(frozen=True)
class Rebase:
    """A rebase in progress. `skipped`: topic -> the series line that replaces it.

    `stop`: the topic at which a human has to decide, and why (`conflict` or `empty`). None: a run is at work, or was killed.
    """

    tree: pathlib.Path
    git: Git
    from_tag: str
    to: Base
    skipped: dict[str, str]
    stop: tuple[str, str] | None = None

    def save(self) -> None:
        fields = ("tag", "version", "commit", "sdist_sha256", "repository")
        data = {"schema": 1, "from": self.from_tag, "to": {f: getattr(self.to, f) for f in fields}, "overlay": list(self.to.overlay), "skipped": self.skipped, "stop": self.stop}
        write_atomic(self.tree / ".git" / "state.json", json.dumps(data, indent=1).encode())


def folder_of(root: pathlib.Path, tag: str) -> pathlib.Path:
    return root / "build" / f"rebase-{tag}"


def in_progress(root: pathlib.Path, ui: Ui) -> list[Rebase]:
    """Every rebase in progress. A damaged state counts as absent."""
    found = []
    for tree in sorted((root / "build").glob("rebase-*")):
        state = tree / ".git" / "state.json"
        if not state.exists():
            continue  # a finished one, left for a look
        try:
            data = json.loads(state.read_text(encoding="utf-8"))
            to = Base(**data["to"], default=False, overlay=tuple(data["overlay"]), folder=root / "patches" / data["to"]["tag"], overlay_root=root / "vllm_overlay")
            stop = (str(data["stop"][0]), str(data["stop"][1])) if data["stop"] else None
            found.append(Rebase(tree, Git(tree, git_dir=tree / ".git", work_tree=tree, log=ui.git), data["from"], to, dict(data["skipped"]), stop))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            ui.note(f"{state} is damaged: that rebase counts as absent, and `rebase --to` starts it again; resolutions are kept in rerere/")
    return found


def find(root: pathlib.Path, ui: Ui) -> Rebase:
    """The rebase in progress. Raises Usage if there is none, or more than one."""
    found = in_progress(root, ui)
    if len(found) > 1:
        raise Usage(f"several rebases are in progress: {', '.join(r.to.tag for r in found)}", f"remove the folder of all but one, for example {found[0].tree}")
    if not found:
        raise Usage("no rebase is in progress", "python apply.py rebase --to REF")
    return found[0]


def start(root: pathlib.Path, base: Base, release: Release, old: Upstream, ui: Ui) -> Rebase:
    """Make the work tree: the new release with the overlay on it, and the old stack as commits beside it."""
    to = _pin(release, base, root)
    if to.folder.exists():
        raise Refused(f"{to.folder} exists already", "choose another release, or move that folder away first")
    tree = folder_of(root, to.tag)
    tree.parent.mkdir(parents=True, exist_ok=True)
    stack_files = stack.read_stack(base)
    with files.locked(tree.parent, ui.note), workspace.scratch(tree.parent, f".{tree.name}.patchstack-") as scratch:
        if others := in_progress(root, ui):
            raise Refused(f"a rebase to {others[0].to.tag} is in progress at {others[0].tree}", "python apply.py rebase --continue, --skip or --abort")
        files.refuse_mounts(tree)
        shutil.rmtree(tree, ignore_errors=True)  # a finished one, or one with a damaged state
        new = scratch / "tree"
        new.mkdir()
        git = Git(new, git_dir=new / ".git", work_tree=new, log=ui.git)
        git.run("init", "--quiet", "--initial-branch=dcp-stack", ".")
        cache.copy_objects(release.upstream.git_dir, new / ".git")
        cache.copy_objects(old.git_dir, new / ".git")
        shallow = {line for u in (old, release.upstream) if (u.git_dir / "shallow").exists() for line in (u.git_dir / "shallow").read_text().split()}
        if shallow:
            (new / ".git" / "shallow").write_text("".join(f"{line}\n" for line in sorted(shallow)))
        built = stack.build(git, old.commit, stack_files.patches, stack_files.overlay)
        tip = stack.build(git, release.upstream.commit, (), stack_files.overlay).commit
        for ref, commit in ((_NEW, release.upstream.commit), (_OLD, built.commit), (_OLD_BASE, old.commit), ("refs/heads/dcp-stack", tip)):
            git.run("update-ref", ref, commit)
        git.run("config", "patchstack.tag", to.tag)
        git.run("reset", "--quiet", "--hard", "HEAD")
        begun = Rebase(new, git, base.tag, to, {})
        begun.save()
        _bring_resolutions(root, new)
        os.rename(new, tree)
    return find(root, ui)


def _pin(release: Release, like: Base, root: pathlib.Path) -> Base:
    """The base.toml of the release, with the hash and commit of what was fetched."""
    base = release.base
    if not base.pinned:
        path = downloaded(base)
        sha = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        match = re.search(rb"commit_id = 'g?([0-9a-f]{7,40})'", release.upstream.version_file or b"")
        if not sha or not match:
            raise Refused(f"{release.name} has no sdist to pin: its hash and commit are not known", "rebase onto a release of the package index")
        base = replace(base, sdist_sha256=sha, commit=match[1].decode())
    return replace(base, default=False, overlay=like.overlay, folder=root / "patches" / base.tag, overlay_root=root / "vllm_overlay")


def topics_done(work: Rebase) -> list[str]:
    return work.git.text("log", "--reverse", "--format=%(trailers:key=Topic,valueonly,separator=)", f"{_NEW}..HEAD").split()


def _old_commits(work: Rebase) -> dict[str, str]:
    """topic -> commit of the old stack, in order, without the overlay."""
    lines = work.git.text("log", "--reverse", "--format=%H %(trailers:key=Topic,valueonly,separator=)", f"{_OLD_BASE}..{_OLD}").splitlines()
    return {topic: commit for commit, topic in (line.split(" ") for line in lines) if topic != stack.OVERLAY_TOPIC}


def advance(work: Rebase, base: Base, root: pathlib.Path, ui: Ui) -> Rebase:
    """Carry every patch that is left. Raises Conflict where a human has to decide. Hold the lock of the work tree's parent."""
    commits = _old_commits(work)
    work = _recover(work, commits)
    if _picking(work):
        topic = work.stop[0] if work.stop else _topic_of(work, "CHERRY_PICK_HEAD")
        _conclude(work, root)
        _stop_if_empty(work, topic)
    elif changed := _dirty(work):
        raise Refused(f"{work.tree} has changes that belong to no patch: {', '.join(changed[:6])}", f"commit them to their topic, or `git -C {work.tree} stash`, then: python apply.py rebase --continue")
    work = _saved(work, stop=None)
    done = set(topics_done(work)) | work.skipped.keys()
    todo = [(t, c) for t, c in commits.items() if t not in done]
    signs = retirements(work, base)
    for number, (topic, commit) in enumerate(todo):
        ui.progress(f"carrying to {work.to.tag}", number, len(todo))
        ran = work.git.try_run(*_MERGE, "cherry-pick", "--allow-empty", "--keep-redundant-commits", commit)
        if _picking(work):
            if _unmerged(work):
                _saved(work, stop=(topic, "conflict"))
                raise Conflict(_describe(work, topic, signs.get(topic, [])), f"edit the files in {work.tree}, `git add` them, then: python apply.py rebase --continue   (or --skip to leave {topic} out, --abort to give up)")
            ui.note(f"{topic}: its conflicts are resolved as recorded in rerere/")
            _conclude(work, root)
        elif ran.returncode:
            raise Refused(f"git could not start to carry {topic}: {ran.stderr.decode('utf-8', 'replace').strip()}", f"git -C {work.tree} status")
        _stop_if_empty(work, topic)
    ui.progress(f"carrying to {work.to.tag}", len(todo), len(todo))
    _keep_resolutions(root, work.tree)
    return work


def _dirty(work: Rebase) -> list[str]:
    """Tracked paths that differ from HEAD."""
    with foreign.opened(inplace.place_of(work.tree), work.git.log) as git:
        seen = worktree.glance(work.tree, git, ())
        return list(seen.dirty) if seen else []


def _saved(work: Rebase, **changes) -> Rebase:
    work = replace(work, **changes)
    work.save()
    return work


def retirements(work: Rebase, base: Base) -> dict[str, list[str]]:
    """topic -> what the patch itself declares about the release that it is carried to."""
    return {p.topic: signs for p in stack.read_stack(base).patches if (signs := declared(p, work.to.version))}


def _recover(work: Rebase, commits: dict[str, str]) -> Rebase:
    """Take back what a killed run left half-done. What a human did at a stop is kept."""
    (work.tree / ".git" / "index.lock").unlink(missing_ok=True)  # only a killed run of ours leaves one: the folder is locked
    done = topics_done(work)
    if _picking(work) and _topic_of(work, "CHERRY_PICK_HEAD") in done:  # killed between the commit and the end of it
        (work.tree / ".git" / "CHERRY_PICK_HEAD").unlink()
    if work.stop:
        return work
    work.git.run("reset", "--quiet", "--hard", "HEAD")
    if done and done[-1] in commits and _is_empty(work):  # killed before the stop at an empty commit: it is tried again
        work.git.run("reset", "--quiet", "--hard", "HEAD^")
        done.pop()
    coming = next((c for t, c in commits.items() if t not in {*done, *work.skipped}), None)
    if coming:  # new files of the pick that was cut off
        for path in work.git.text("diff-tree", "-r", "-z", "--no-commit-id", "--name-only", "--diff-filter=A", coming).split("\0"):
            if path and not work.git.ok("ls-files", "--error-unmatch", "--", path):
                (work.tree / path).unlink(missing_ok=True)
    return work


def _is_empty(work: Rebase) -> bool:
    return work.git.text("rev-parse", "HEAD^{tree}") == work.git.text("rev-parse", "HEAD^^{tree}")


def _stop_if_empty(work: Rebase, topic: str) -> None:
    """A commit without a change is taken back: a human decides."""
    if not _is_empty(work):
        return
    work.git.run("reset", "--quiet", "--hard", "HEAD^")
    _saved(work, stop=(topic, "empty"))
    raise Conflict(f"{topic}: nothing is left of it on {work.to.tag}: upstream has the change (proof: empty after a 3-way merge)",
                   f"retire it: python apply.py rebase --skip   (the series will say `upstream {topic} {work.to.tag}`; --continue tries it again, --abort gives up)")  # fmt: skip


def _topic_of(work: Rebase, commit: str) -> str:
    return work.git.text("log", "-1", "--format=%(trailers:key=Topic,valueonly,separator=)", commit).strip()


def _picking(work: Rebase) -> bool:
    return (work.tree / ".git" / "CHERRY_PICK_HEAD").exists()


def _unmerged(work: Rebase) -> list[str]:
    return work.git.text("diff", "--name-only", "--diff-filter=U").splitlines()


def _conclude(work: Rebase, root: pathlib.Path) -> None:
    """Commit a pick whose conflicts are resolved, and keep the resolution."""
    if left := _unmerged(work):
        raise Conflict(f"still unresolved: {', '.join(left)}", f"edit them in {work.tree}, `git add` them, then: python apply.py rebase --continue")
    marked = work.git.try_run("diff", "--check", "--cached").stdout.decode("utf-8", "replace")
    if "conflict marker" in marked:
        raise Conflict("a conflict marker was added:\n" + "\n".join(line for line in marked.splitlines() if "conflict marker" in line), f"take it out in {work.tree}, `git add`, then: python apply.py rebase --continue")
    work.git.run(*_MERGE, "commit", "--quiet", "--no-verify", "--allow-empty", "--reuse-message=CHERRY_PICK_HEAD")
    _keep_resolutions(root, work.tree)


def _describe(work: Rebase, topic: str, signs: list[str]) -> str:
    """The conflict in words: every file, and what became of one that upstream no longer has."""
    lines = [f"{topic} conflicts with {work.to.tag}:"]
    for path in _unmerged(work):
        stages = {line.split()[2] for line in work.git.text("ls-files", "--unmerged", "--", path).splitlines()}
        gone = "" if "2" in stages else f" ({where_did_it_go(work.git, _OLD_BASE, _NEW, path)}: make the change there, then `git rm` this file)"
        lines.append(f"- {path}{gone}")
    return "\n".join([*lines, *(f"it may be time to retire it: {sign}" for sign in signs)])


def skip(work: Rebase, base: Base, drift: PatchDrift | None) -> tuple[Rebase, str]:
    """Leave out the topic that the rebase stopped at. With a sign that upstream has it, the series says so; else it says `n/a`."""
    if work.stop is None:
        raise Refused("the rebase did not stop at a patch", "python apply.py rebase --continue")
    topic, why = work.stop
    if topic in topics_done(work):
        raise Refused(f"{topic} is committed already", "python apply.py rebase --continue")
    (work.tree / ".git" / "index.lock").unlink(missing_ok=True)
    work.git.run("reset", "--quiet", "--hard", "HEAD")
    work.git.try_run("rerere", "clear")
    patch = next(p for p in stack.read_stack(base).patches if p.topic == topic)
    pulls = pull_requests(patch)
    taken = why == "empty" or (drift is not None and (drift.state == UPSTREAM or drift.signals))
    line = f"upstream {topic} {work.to.tag} {f'vllm-project/vllm#{pulls[0]}' if pulls else 'unknown'}" if taken else f"n/a {topic} left out when the stack was carried to {work.to.tag}"
    return _saved(work, skipped=work.skipped | {topic: line}, stop=None), line


def propose(work: Rebase, base: Base, old: Upstream, new: Upstream, ui: Ui) -> dict[str, PatchDrift]:
    """What `drift` says of each patch: the proof for a retirement."""
    report = analyse(stack.read_stack(base), old, new, work.to.tag, work.to.version, None, ui)
    return {p.topic: p for p in report.patches}


def finish(work: Rebase, base: Base, root: pathlib.Path, ui: Ui) -> str:
    """Write patches/<tag>/ in one step, prove the round trip, and return git's range-diff of old and new stack."""
    with files.locked(work.to.folder.parent, ui.note), workspace.scratch(work.to.folder.parent, f".{work.to.tag}.patchstack-") as scratch:
        new = scratch / work.to.tag
        new.mkdir()
        (new / "base.toml").write_text(_base_toml(work.to), encoding="utf-8")
        (new / "series").write_text(_series_text(load_series(base.folder).text, base, work), encoding="utf-8")
        for topic in topics_done(work):
            if topic != stack.OVERLAY_TOPIC and (base.folder / f"{topic}.patch").exists():
                shutil.copy2(base.folder / f"{topic}.patch", new)
        planned = export.plan(work.tree, replace(work.to, folder=new), False, ui)
        if planned.overlay_changed:
            raise Refused(f"{work.tree} changes overlay files, which every base shares: {', '.join(planned.overlay_changed)}", "take that change out of the commits and make it in vllm_overlay/, or as a patch; then: python apply.py rebase --continue")
        for patch in planned.patches:
            patch.path.write_bytes(patch.data)
        (new / "series").write_text(planned.series_text, encoding="utf-8")
        (new / "lock.json").write_text(planned.lock_text, encoding="utf-8")
        if not work.to.folder.exists():
            os.rename(new, work.to.folder)
        elif _contents(new) != _contents(work.to.folder):  # the same: a run was killed after this step
            raise Refused(f"{work.to.folder} exists, and it is not what this rebase made", "move it away, then: python apply.py rebase --continue")
    return work.git.text("range-diff", "--no-color", f"{_OLD_BASE}..{_OLD}", f"{_NEW}..HEAD")


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def _series_text(text: str, base: Base, work: Rebase) -> str:
    """The series of the new base: skipped topics, and the parts of them, by the line that says why."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        topic = line.strip().removesuffix(".patch")
        if line.startswith("#"):
            line = line.replace(base.tag, work.to.tag).replace(", the default base", "")
        elif topic in work.skipped:
            line = work.skipped[topic]
        elif words[:1] == ["part"] and words[2] in work.skipped:
            line = work.skipped[words[2]].replace(f" {words[2]} ", f" {words[1]} ", 1)
        elif words[:1] == ["upstream"] and numbers(words[2]) > numbers(work.to.version):
            line = f"n/a {words[1]} upstream has it from {words[2]} on, by {words[3]}"
        lines.append(f"{line}\n")
    return "".join(lines)


def _base_toml(base: Base) -> str:
    overlay = "".join(f'    "{p}",\n' for p in base.overlay)
    return (f'# The pinned upstream release. `commit` is as long as the sdist names it.\ntag = "{base.tag}"\nversion = "{base.version}"\ncommit = "{base.commit}"\n'
            f'sdist_sha256 = "{base.sdist_sha256}"\nrepository = "{base.repository}"\ndefault = false\n# Files of vllm_overlay/ that this base takes.\n'
            f"overlay = [\n{overlay}]\n")  # fmt: skip


def abort(work: Rebase) -> None:
    """Forget the rebase. Nothing outside its folder was written, but the resolutions already recorded."""
    files.refuse_mounts(work.tree)
    with workspace.scratch(work.tree.parent, f".{work.tree.name}.patchstack-") as scratch:
        os.rename(work.tree, scratch / "tree")  # in one step: a kill in the middle of the removal leaves no half state
    with contextlib.suppress(OSError):  # other things may be kept there
        work.tree.parent.rmdir()


def _bring_resolutions(root: pathlib.Path, tree: pathlib.Path) -> None:
    if (root / "rerere").is_dir():
        shutil.copytree(root / "rerere", tree / ".git" / "rr-cache", dirs_exist_ok=True)


def _keep_resolutions(root: pathlib.Path, tree: pathlib.Path) -> None:
    """Copy resolutions (conflict and answer) into the project, where they are committed."""
    for post in sorted((tree / ".git" / "rr-cache").glob("*/postimage*")):
        pre = post.with_name(post.name.replace("postimage", "preimage"))
        for file in (pre, post):  # the answer last: without it a conflict is not taken for resolved
            target = root / "rerere" / file.parent.name / file.name
            if file.exists() and (not target.exists() or target.read_bytes() != file.read_bytes()):
                write_atomic(target, file.read_bytes())


def done(work: Rebase) -> None:
    """The rebase is over: the tree stays for a look, the state goes."""
    (work.tree / ".git" / "state.json").unlink(missing_ok=True)
