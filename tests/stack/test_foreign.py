# SPDX-License-Identifier: Apache-2.0
"""Nothing of an inspected repository runs: every key and file by which git can be made to run something, in a stranger's tree."""
import os
import pathlib
import shutil

import pytest

from . import project as fake
from .project import OVERLAY_PATH, TAG, commit, expected, git, patched_files, snapshot, upstream_files

# name -> (configuration, files in .git, files in the tree). {trap}: a program that leaves a mark.
TRAPS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "clean filter": ({"filter.evil.clean": "{trap}", "filter.evil.smudge": "{trap}", "filter.evil.required": "true"}, {"info/attributes": "* filter=evil\n"}, {}),
    "filter process": ({"filter.evil.process": "{trap}"}, {"info/attributes": "* filter=evil\n"}, {}),
    "filter by core.attributesFile": ({"filter.evil.clean": "{trap}", "core.attributesFile": "{room}/attributes"}, {}, {}),
    "filter by an untracked .gitattributes": ({"filter.evil.clean": "{trap}", "diff.evil.textconv": "{trap}", "diff.evil.command": "{trap}", "merge.evil.driver": "{trap}"}, {}, {"vllm/.gitattributes": "* filter=evil diff=evil merge=evil\n"}),
    "fsmonitor": ({"core.fsmonitor": "{trap}", "core.untrackedCache": "true"}, {}, {}),
    "hooks": ({}, {f"hooks/{name}": "{trap}" for name in ("pre-commit", "post-index-change", "reference-transaction", "post-checkout", "pre-auto-gc", "post-rewrite", "fsmonitor-watchman", "post-merge", "push-to-checkout", "update", "proc-receive")}, {}),
    "core.hooksPath": ({"core.hooksPath": "{room}/hooks"}, {}, {}),
    "configured hooks": ({"hook.evil.command": "{trap}", "hook.evil.event": "reference-transaction"}, {}, {}),
    "signatures": ({"log.showSignature": "true", "gpg.program": "{trap}", "gpg.openpgp.program": "{trap}", "gpg.ssh.program": "{trap}", "gpg.x509.program": "{trap}", "commit.gpgSign": "true", "gpg.ssh.defaultKeyCommand": "{trap}"}, {}, {}),
    "diff": ({"diff.external": "{trap}", "diff.evil.textconv": "{trap}", "diff.evil.command": "{trap}", "interactive.diffFilter": "{trap}"}, {"info/attributes": "* diff=evil\n"}, {}),
    "promisor remote": ({"remote.origin.promisor": "true", "remote.origin.partialCloneFilter": "blob:none", "extensions.partialClone": "origin", "remote.origin.uploadpack": "{trap}", "remote.origin.url": "file://{room}/upstream"}, {}, {}),
    "transports": ({"remote.origin.promisor": "true", "extensions.partialClone": "origin", "remote.origin.url": "ext::{trap} %S", "protocol.ext.allow": "always", "remote.origin.vcs": "evil", "core.sshCommand": "{trap}", "core.gitProxy": "{trap}",
                    "credential.helper": "!{trap}", "core.askPass": "{trap}"}, {}, {}),  # fmt: skip
    "pager, editor, alias": ({"core.pager": "{trap}", "pager.log": "{trap}", "pager.config": "{trap}", "core.editor": "{trap}", "sequence.editor": "{trap}", "alias.status": "!{trap}", "alias.rev-parse": "!{trap}", "alias.ls-tree": "!{trap}"}, {}, {}),
    "trailers": ({"trailer.topic.command": "{trap}", "trailer.topic.cmd": "{trap}", "trailer.topic.key": "Topic"}, {}, {}),
    "hooks of upload-pack and gc": ({"uploadpack.packObjectsHook": "{trap}", "core.alternateRefsCommand": "{trap}", "gc.recentObjectsHook": "{trap}", "receive.procReceiveRefs": "refs", "gc.auto": "1", "maintenance.auto": "true"}, {}, {}),
    "an included file": ({"include.path": "{room}/included"}, {}, {}),
    "a file of the worktree": ({"extensions.worktreeConfig": "true", "core.repositoryFormatVersion": "1"}, {"config.worktree": "[core]\n\tfsmonitor = {trap}\n\thooksPath = {room}/hooks\n[filter \"evil\"]\n\tclean = {trap}\n", "info/attributes": "* filter=evil\n"}, {}),
    "a program named git": ({}, {"git": "{trap}"}, {"git": "{trap}"}),
}  # fmt: skip


def lay(project, tree: pathlib.Path, name: str) -> pathlib.Path:
    """Set a trap in `tree`; returns the mark that it leaves."""
    room, mark = project.room, project.room / "ran"
    trap = room / "trap"
    trap.write_text(f"#!/bin/sh\necho \"$0 $*\" >> '{mark}'\ncat\n")
    trap.chmod(0o755)
    settings, inside, beside = TRAPS[name]
    (room / "attributes").write_text("* filter=evil\n")
    (room / "included").write_text(f'[core]\n\tfsmonitor = {trap}\n\thooksPath = {room}/hooks\n[filter "evil"]\n\tclean = {trap}\n')
    (room / "hooks").mkdir(exist_ok=True)
    for hook in ("reference-transaction", "post-index-change", "post-checkout"):
        shutil.copy(trap, room / "hooks" / hook)
    for key, value in settings.items():
        git(tree, "config", key, value.format(trap=trap, room=room))
    for folder, files in ((tree / ".git" if (tree / ".git").exists() else tree, inside), (tree, beside)):
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True, parents=True)
            if text == "{trap}":
                shutil.copy(trap, folder / path)
            else:
                (folder / path).write_text(text.format(trap=trap, room=room))
    for path in ("README.md", "vllm/envs.py", "setup.py"):  # git has to look at these again
        if (tree / path).exists():
            os.utime(tree / path, (1, 1))
    return mark


@pytest.mark.parametrize("name", TRAPS)
def test_nothing_of_the_tree_runs(project, name):
    clone = project.clone()
    mark = lay(project, clone, name)
    env = {"PATH": f".{os.pathsep}{os.environ['PATH']}"} if "named git" in name else {}
    own = {k: v for k, v in snapshot(clone).items() if k not in expected(upstream_files(), link=True)}
    ran = lambda: mark.read_text() if mark.exists() else ""
    assert project.run("status", clone, "--json", env=env, cwd=clone).json["state"] == "unapplied" and ran() == ""
    project.apply("--source", clone, dest=project.room / "from", env=env)
    assert ran() == ""
    project.apply("--verify", dest=clone, env=env)
    assert snapshot(clone) == expected(patched_files(), link=True) | own and ran() == ""
    project.run("export", clone, env=env)
    assert ran() == ""
    project.run("unapply", clone, env=env)
    assert snapshot(clone) == expected(upstream_files(), link=True) | own and ran() == ""


@pytest.mark.parametrize("name", ["clean filter", "filter by core.attributesFile", "filter by an untracked .gitattributes", "fsmonitor", "hooks", "core.hooksPath", "an included file", "a file of the worktree"])
def test_the_traps_work(project, name):
    """On git itself: `git status` and `git update-ref` in that tree leave the mark."""
    clone = project.clone()
    mark = lay(project, clone, name)
    git(clone, "status", check=False)
    git(clone, "update-ref", "refs/heads/x", "HEAD", check=False)
    assert mark.exists()


@pytest.mark.parametrize("name", ["clean filter", "signatures", "diff", "hooks of upload-pack and gc"])
def test_nor_of_a_repository_that_drift_and_carve_look_at(project, name):
    mark = lay(project, project.upstream, name)
    project.run("drift", "--ref", project.upstream, code=None)
    pytest.importorskip("git_filter_repo")
    project.run("carve", project.upstream, "--out", project.room / "carved.git")
    for key, value in TRAPS[name][0].items():
        git(project.room / "carved.git", "config", key, value.format(trap=project.room / "trap", room=project.room))
    (project.room / "carved.git/info").mkdir(exist_ok=True)
    (project.room / "carved.git/info/attributes").write_text("* diff=evil filter=evil\n")
    project.run("drift", "--ref", TAG, "--history", project.room / "carved.git")
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("name", ["clean filter", "hooks", "core.hooksPath", "signatures", "diff", "promisor remote", "transports", "pager, editor, alias", "trailers", "hooks of upload-pack and gc", "an included file"])
def test_nor_of_a_cache_that_others_can_write(project, name):
    """Its packs are compared with their sums; nothing says what its configuration should be."""
    (cached,) = (project.cache / "bases").glob(f"{TAG}-sdist-*.git")
    mark = lay(project, cached, name)
    project.apply("--verify")
    project.run("verify", "--each", project.tree)
    project.run("lint")
    project.run("drift", "--ref", TAG)
    (cached / "refs/stack/version").write_text("1234567890" * 4 + "\n")  # a missing object would be asked from the remote
    project.apply(dest=project.room / "second")
    assert not mark.exists(), mark.read_text()


def test_a_submodule_is_not_entered(project):
    """`git status` would run git in it, with its configuration."""
    inner, clone = project.room / "inner", project.clone()
    inner.mkdir()
    git(inner, "init", "--quiet", "--template=", ".")
    commit(inner, {"x": b"1\n"}, "x\n")
    git(clone, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "third/inner")
    git(clone, "commit", "-qm", "a submodule")
    mark = project.room / "ran"
    trap = project.room / "trap"
    trap.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    trap.chmod(0o755)
    git(clone / "third/inner", "config", "core.fsmonitor", str(trap))
    git(clone / "third/inner", "config", "filter.evil.clean", str(trap))
    (clone / ".git/modules/third/inner/info").mkdir(exist_ok=True)
    (clone / ".git/modules/third/inner/info/attributes").write_text("* filter=evil\n")
    (clone / "third/inner/x").write_text("2\n")
    git(clone / "third/inner", "status")
    assert mark.exists()  # the trap works
    mark.unlink()
    assert project.run("status", clone, "--json").json["state"] == "unapplied"
    project.apply(dest=clone)
    project.run("unapply", clone)
    assert not mark.exists() and (clone / "third/inner/x").read_text() == "2\n"
    commit(clone / "third/inner", {"y": b"1\n"}, "y\n")
    assert "third/inner" in project.apply(dest=clone, code=3).err  # at another commit than the recorded one
    shutil.rmtree(clone / "third/inner")
    (clone / "third/inner").mkdir()
    assert project.run("status", clone, "--json").json["state"] == "unapplied"  # not checked out


@pytest.mark.parametrize("evil", ["../evil", ".git/hooks/post-checkout", "vllm/../../evil", "link"])
def test_commits_that_lead_out_of_the_tree_are_refused(applied, evil):
    """The recorded base is what the tree says it is: a stranger's may have any path in it."""
    blob = git(applied.tree, "hash-object", "-w", "--stdin", input=b"evil\n")
    tree = b"%s %s\0%b" % (b"120000" if evil == "link" else b"100644", evil.rpartition("/")[2].encode(), bytes.fromhex(blob))
    for part in reversed(evil.split("/")[:-1]):
        oid = git(applied.tree, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", input=tree)
        tree = b"40000 %b\0%b" % (part.encode(), bytes.fromhex(oid))
    oid = git(applied.tree, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", input=tree)
    git(applied.tree, "update-ref", "refs/patchstack/base", git(applied.tree, "commit-tree", "-m", "x", oid))
    before = snapshot(applied.room / "work", skip=("objects",))
    done = applied.run("unapply", applied.tree, code=3)
    assert "leaves the tree" in done.err and "Traceback" not in done.err
    assert snapshot(applied.room / "work", skip=("objects",)) == before


def test_a_module_named_pip_where_the_user_stands(project):
    """`python -m pip` would take it: somebody runs the tool from within a tree that he only wants to look at."""
    clone, mark = project.clone(), project.room / "ran"
    shutil.rmtree(project.cache)
    for name in ("pip.py", "setuptools.py", "git.py", "patchstack.py", "argparse.py"):
        (clone / name).write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(1)\n")
    project.run("apply", "--source", "pypi", "--dest", project.tree, cwd=clone)
    project.run("drift", "--ref", "latest", cwd=clone, code=None)
    assert not mark.exists()


# ---- repositories of unusual kinds


def test_a_sha256_repository_is_named(project):
    tree = project.room / "work" / "sha256"
    tree.mkdir()
    git(tree, "init", "--quiet", "--object-format=sha256", ".")
    commit(tree, fake.FILES, "x\n")
    for command in (("status", tree), ("apply", "--dest", tree), ("apply", "--source", tree, "--dest", project.room / "x")):
        done = project.run(*command, code=3)
        assert "objectformat = sha256" in done.err and "next:" in done.err


@pytest.mark.parametrize("key,value", [("extensions.refStorage", "reftable"), ("core.repositoryFormatVersion", "7"), ("extensions.fromTheFuture", "1")])
def test_an_unknown_format_is_named(project, key, value):
    clone = project.clone()
    git(clone, "config", "core.repositoryFormatVersion", "1")
    git(clone, "config", key, value)
    done = project.run("status", clone, code=3)
    assert value in done.err and "another format" in done.err
    assert snapshot(clone) == expected(upstream_files(), link=True)


def test_a_configuration_that_git_cannot_read_is_named(project):
    clone = project.clone()
    (clone / ".git/config").write_text("[core\n")
    assert "config cannot be read" in project.run("status", clone, code=3).err


def partial(project) -> pathlib.Path:
    git(project.upstream, "config", "uploadpack.allowFilter", "true")
    git(project.room, "clone", "--quiet", "--no-checkout", "--filter=blob:none", f"file://{project.upstream}", "work/partial")
    return project.room / "work" / "partial"


def test_a_partial_clone_is_named_and_fetches_nothing(project):
    clone = partial(project)
    before = snapshot(clone / ".git")
    done = project.apply("--source", clone, dest=project.room / "x", code=3)
    assert "partial clone" in done.err and "--refetch" in done.err
    project.run("status", clone, code=1)
    assert snapshot(clone / ".git") == before


def test_a_partial_clone_that_is_checked_out_works_in_place(project):
    clone = partial(project)
    git(clone, "-c", "protocol.file.allow=always", "checkout", "--quiet", "-B", "mine", TAG)
    shutil.move(project.upstream, project.room / "gone")
    project.apply(dest=clone)
    assert snapshot(clone) == expected(patched_files(), link=True) and git(clone, "status", "--porcelain") == ""
    project.run("unapply", clone)
    assert snapshot(clone) == expected(upstream_files(), link=True)


@pytest.mark.parametrize("state", ["other owner", "shallow", "bare", "linked worktree", "alternates", "unreadable config", "packed refs only"])
def test_unusual_sources_work(project, state):
    """`git fetch` refuses some of them."""
    shutil.rmtree(project.cache)
    source = project.clone()
    if state == "other owner":
        if os.geteuid() != 0:
            pytest.skip("needs root: files of another user")
        for path in [source, *source.rglob("*")]:
            os.chown(path, 1234, 2345, follow_symlinks=False)
    elif state == "shallow":
        git(project.room, "clone", "--quiet", "--depth=1", f"file://{project.upstream}", "work/shallow")
        source = project.room / "work/shallow"
    elif state == "bare":
        git(project.room, "clone", "--quiet", "--bare", "upstream", "bare.git")
        source = project.room / "bare.git"
    elif state == "linked worktree":
        git(source, "worktree", "add", "--quiet", "--detach", str(project.room / "linked"), fake.OLD)
        source = project.room / "linked"
    elif state == "alternates":
        git(project.room, "clone", "--quiet", "--shared", "--template=", str(project.upstream), "work/shared")
        source = project.room / "work/shared"
    elif state == "unreadable config":
        git(source, "config", "core.bare", "true")
        git(source, "config", "core.worktree", "/nonexistent")
    elif state == "packed refs only":
        git(source, "pack-refs", "--all")
    project.apply("--source", source)
    assert snapshot(project.tree) == expected(patched_files(), link=True)
    assert git(project.tree, "fsck", "--strict", "--no-dangling") == ""


@pytest.mark.parametrize("how", ["--split-index", "--index-version=4", "--untracked-cache", "--fsmonitor", "sparse", "intent to add", "resolved conflicts"])
def test_unusual_indexes_work_in_place(project, how):
    clone = project.clone()
    status = ""
    if how == "sparse":
        git(clone, "sparse-checkout", "set", "--cone", "--sparse-index", "vllm", "docs")
        assert git(clone, "ls-files", "--sparse").count("/\n") > 0
    elif how == "intent to add":
        (clone / "own.py").write_text("1\n")
        git(clone, "add", "--intent-to-add", "own.py")
        assert "own.py" in project.apply(dest=clone, code=3).err  # staged, in a way
        git(clone, "rm", "--cached", "--quiet", "own.py")
        status = "?? own.py"
    elif how == "resolved conflicts":
        git(clone, "checkout", "--quiet", "-b", "other")
        commit(clone, {"vllm/envs.py": b"1\n"}, "x\n")
        git(clone, "checkout", "--quiet", "mine")
        commit(clone, {"vllm/envs.py": b"2\n"}, "y\n")
        git(clone, "merge", "other", check=False)
        git(clone, "add", "vllm/envs.py")
        git(clone, "reset", "--quiet", "--hard", TAG)
    else:
        git(clone, "-c", "core.fsmonitor=false", "update-index", *(["--index-version", "4"] if "version" in how else [how]))
    before = snapshot(clone)
    assert git(clone, "status", "--porcelain") == status
    for command, state in ((("apply", "--dest", clone), "applied"), (("unapply", clone), "unapplied")):
        project.run(*command)
        assert project.run("status", clone, "--json").json["state"] == state
        assert git(clone, "status", "--porcelain") == status and git(clone, "fsck", "--no-dangling") == ""
    assert snapshot(clone) == before


@pytest.mark.parametrize("state", ["dangling .git file", "no objects", "an object is missing", "an object is damaged", "neither tag nor commit"])
def test_broken_sources_are_named(project, state):
    shutil.rmtree(project.cache)
    source = project.clone()
    said, code = "not all of its files", 3
    if state == "dangling .git file":
        shutil.rmtree(source / ".git")
        (source / ".git").write_text("gitdir: /nonexistent\n")
        said = "no whole git repository"
    elif state == "no objects":
        shutil.rmtree(source / ".git/objects")
        said = "no whole git repository"
    elif state == "neither tag nor commit":
        git(source, "tag", "-d", TAG)
        source = project.room / "empty"
        source.mkdir()
        git(source, "init", "--quiet", ".")
        said, code = "neither the tag", 5
    else:
        loose(source)
        path = object_file(source, f"{TAG}:vllm/envs.py")
        other = object_file(source, f"{TAG}:README.md").read_bytes()
        path.unlink()
        if state == "an object is damaged":
            path.write_bytes(other)
    done = project.apply("--source", source, code=code)
    assert said in done.err and "next:" in done.err and "Traceback" not in done.err
    assert not project.tree.exists() and project.leftovers() == []


def loose(tree: pathlib.Path) -> None:
    """Unpack every object."""
    for pack in list((tree / ".git/objects/pack").glob("*.pack")):
        moved = pack.rename(tree.parent / pack.name)
        for path in (tree / ".git/objects/pack").glob(f"{pack.stem}.*"):
            path.unlink()
        git(tree, "unpack-objects", "-q", input=moved.read_bytes())
        moved.unlink()


def object_file(tree: pathlib.Path, revision: str) -> pathlib.Path:
    oid = git(tree, "rev-parse", revision)
    return tree / ".git/objects" / oid[:2] / oid[2:]


# ---- vouching: what is called exact or applied was read


def forged(tree: pathlib.Path, path: str) -> None:
    """Edit a file so that its size and times are what they were."""
    file = tree / path
    before, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("path", ["vllm/envs.py", OVERLAY_PATH, "README.md"])
@pytest.mark.parametrize("how", ["times put back", "--assume-unchanged", "--skip-worktree", "--fsmonitor-valid"])
def test_an_edit_that_git_does_not_see_is_seen(applied, path, how):
    git(applied.tree, "status")
    if how.startswith("--"):
        git(applied.tree, "update-index", how, path)
    forged(applied.tree, path)
    found = applied.run("status", applied.tree, "--json", code=1).json
    assert found["state"] == "modified" and path in found["detail"]
    done = applied.run("verify", applied.tree, "--json", code=1).json
    assert path in {f["path"] for f in done["findings"]} and done["level"] is None
    assert applied.apply(code=3).err  # nor is it "already applied"
    if path != "README.md":
        assert path in applied.run("unapply", applied.tree, code=3).err


def test_a_sparse_checkout_is_not_called_exact(applied):
    git(applied.tree, "sparse-checkout", "set", "vllm", "docs")
    found = applied.run("status", applied.tree, "--json").json
    assert (found["state"], found["level"]) == ("applied", "touched") and "were not read" in found["detail"]
    assert applied.run("verify", applied.tree, "--json").json["level"] == "touched"
    applied.run("unapply", applied.tree)
    assert applied.run("status", applied.tree, "--json").json["level"] == "touched"


def test_a_sparse_checkout_without_files_of_the_stack_is_refused_by_name(project):
    clone = project.clone()
    git(clone, "sparse-checkout", "set", "docs")
    before = snapshot(clone)
    done = project.apply(dest=clone, code=3)
    assert "sparse checkout" in done.err and "vllm/envs.py" in done.err and "sparse-checkout add" in done.err
    assert snapshot(clone) == before
    git(clone, "sparse-checkout", "add", "vllm")
    project.apply(dest=clone)
    assert project.run("status", clone, "--json").json["state"] == "applied" and git(clone, "status", "--porcelain") == ""


def test_line_ends_that_upstream_s_own_attributes_ask_for_are_no_edit(project):
    """The stack's files are compared byte for byte; others may be checked out as HEAD's .gitattributes say."""
    clone = project.clone()
    commit(clone, {".gitattributes": b"README.md text eol=crlf\n"}, "attributes\n")
    (clone / "README.md").unlink()
    git(clone, "checkout", "--", "README.md")
    assert (clone / "README.md").read_bytes().endswith(b"\r\n")
    assert project.run("status", clone, "--json").json["state"] == "unapplied"
    project.apply(dest=clone)
    (clone / "README.md").write_bytes(b"edited\r\n")
    assert project.run("status", clone, "--json", code=1).json["state"] == "modified"
    (clone / ".gitattributes").write_bytes(b"README.md text eol=crlf\nvllm/* ident\n")
    assert project.run("status", clone, "--json", code=1).json["state"] == "modified"


def test_replaced_objects_are_not_believed(applied):
    """`git replace` shows another tree under HEAD's name."""
    head = git(applied.tree, "rev-parse", "HEAD")
    other = git(applied.tree, "commit-tree", "-m", "x", "upstream^{tree}")
    git(applied.tree, "replace", head, other)
    assert git(applied.tree, "rev-parse", "HEAD^{tree}") == git(applied.tree, "rev-parse", "upstream^{tree}")
    assert applied.run("status", applied.tree, "--json").json["level"] == "exact"
    applied.run("verify", applied.tree)


def swap(tree: pathlib.Path, one: str, other: str) -> None:
    """Make the index of the only pack lie: each of two objects is found under the other's name."""
    (index,) = (tree / ".git/objects/pack").glob("*.idx")
    data = bytearray(index.read_bytes())
    count = int.from_bytes(data[8 + 255 * 4 : 8 + 256 * 4], "big")
    names = [bytes(data[1032 + 20 * n : 1052 + 20 * n]) for n in range(count)]
    at = [1032 + 24 * count + 4 * names.index(bytes.fromhex(git(tree, "rev-parse", revision))) for revision in (one, other)]
    data[at[0] : at[0] + 4], data[at[1] : at[1] + 4] = data[at[1] : at[1] + 4], data[at[0] : at[0] + 4]
    index.chmod(0o644)
    index.write_bytes(data)


def test_a_pack_whose_index_lies_about_a_tree_is_found(applied):
    """git shows what it is given. Here the release's folder under the name of the patched one."""
    git(applied.tree, "repack", "-adq")
    swap(applied.tree, "HEAD:vllm", "upstream:vllm")
    assert "gamma" not in git(applied.tree, "ls-tree", "--name-only", "HEAD", "vllm/")
    done = applied.run("status", applied.tree, code=3)
    assert "damaged" in done.err and "fsck" in done.err


@pytest.mark.parametrize("command", ["status", "verify", "unapply"])
def test_objects_that_are_not_what_their_names_say_are_found(applied, command):
    """git hashes nothing that it reads."""
    loose(applied.tree)
    if command == "status":
        path, other = object_file(applied.tree, "HEAD^{tree}"), object_file(applied.tree, "upstream^{tree}")
    else:
        path, other = object_file(applied.tree, "upstream:vllm/envs.py"), object_file(applied.tree, "upstream:README.md")
    data = other.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data)
    before = snapshot(applied.tree)
    done = applied.run(command, applied.tree, code=3)
    assert "damaged" in done.err and "fsck" in done.err, done
    assert snapshot(applied.tree) == before


def largest(project, suffix: str) -> pathlib.Path:
    return max((project.cache / "bases").glob(f"{TAG}-sdist-*.git/objects/pack/*{suffix}"), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("suffix", [".pack", ".idx"])
def test_a_byte_of_the_cache_that_changed_is_found(project, suffix):
    """Same size, same times, same inode."""
    pack = largest(project, suffix)
    before, data = pack.stat(), bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = project.apply("--verify", "--json")
    assert "is damaged" in done.err and done.json["verify"]["findings"] == []
    assert git(project.tree, "fsck", "--no-dangling") == ""
    assert "is damaged" not in project.apply(dest=project.room / "second").err  # it was made anew


def test_a_damaged_cache_without_a_source_is_an_error(project):
    pack = largest(project, ".pack")
    pack.chmod(0o644)
    pack.write_bytes(pack.read_bytes()[:-1] + b"\0")
    shutil.rmtree(project.index)
    shutil.rmtree(project.upstream)
    shutil.rmtree(project.cache / "downloads", ignore_errors=True)
    assert "is damaged" in project.apply(code=5).err


def test_a_tree_shares_no_file_with_the_cache(applied):
    inodes = {p.stat().st_ino for p in applied.cache.rglob("*") if p.is_file()}
    mine = [p for p in (applied.tree / ".git").rglob("*") if p.is_file()]
    assert all(p.stat().st_nlink == 1 and p.stat().st_ino not in inodes for p in mine)


# ---- a patch in which git sees more than the reader


HIDDEN = b"--- a/setup.py\n+++ b/setup.py\n@@ -1 +1 @@\n-raise SystemExit(\"setup.py of the sdist was run\")\n+import os\n"


def hide(project, edit) -> None:
    import hashlib
    import json

    path = project.folder() / "gamma.patch"
    path.write_bytes(edit(path.read_bytes()))
    lock = json.loads((project.folder() / "lock.json").read_text())
    next(p for p in lock["patches"] if p["topic"] == "gamma")["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (project.folder() / "lock.json").write_text(json.dumps(lock))


@pytest.mark.parametrize("kind", ["no diff --git line", "one more hunk", "encoded mail"])
def test_what_only_git_sees_in_a_patch_is_refused(project, kind):
    def edit(data: bytes) -> bytes:
        if kind == "no diff --git line":
            return data + HIDDEN
        if kind == "one more hunk":
            return data + HIDDEN.replace(b"setup.py\n", b"docs/a file.md\n").split(b"@@ -1")[0] + b"@@ -1 +1 @@\n-a path with a space, edited\n+evil\n"
        head, _, body = data.partition(b"\n\n")
        hidden = (b"diff =2D-git a/setup.py b/setup.py\n" + HIDDEN).replace(b"diff =2D-", b"diff =2D-")
        return head.replace(b"Content-Transfer-Encoding: 8bit", b"") + b"\nMIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: quoted-printable\n\n" + body.replace(b"=", b"=3D") + hidden

    hide(project, edit)
    done = project.apply(code=3)
    assert "gamma.patch: git would change something else than the patch shows" in done.err, done
    assert "setup.py: git +1 -1 lines, by its `diff --git` lines nothing" in done.err or kind != "no diff --git line"
    assert not project.tree.exists()
    shutil.rmtree(project.cache / "bases")  # also without a tree to apply it to
    lint = project.run("lint", code=1)
    assert any("git would change something else" in line and "gamma.patch" in line for line in lint.out.splitlines()), lint
