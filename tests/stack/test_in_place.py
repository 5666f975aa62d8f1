# SPDX-License-Identifier: Apache-2.0
"""`apply` on a tree that exists already, and `unapply`: what is refused, what survives, where HEAD ends up."""
import shutil

import pytest

from .project import LINK, OLD, OVERLAY, OVERLAY_PATH, TAG, commit, expected, git, message, patched_files, snapshot, upstream_files, write_files

OWN = {"notes.txt": b"untracked\n", "ignored/build.o": b"\0ignored", "vllm/_version.py": b"version = 'mine'\n", "deep/er/x.log": b"ignored too\n"}


def from_git(files: dict[str, bytes]) -> dict[str, bytes]:
    return expected(files, link=True)


def test_apply_and_unapply_keep_untracked_and_ignored_files(project):
    clone = project.clone()
    write_files(clone, OWN)
    inode = (clone / "notes.txt").stat().st_ino
    project.apply(dest=clone)
    assert snapshot(clone) == from_git(patched_files()) | OWN
    assert git(clone, "status", "--porcelain") == "?? notes.txt"
    project.run("unapply", clone)
    assert snapshot(clone) == from_git(upstream_files()) | OWN
    assert (clone / "notes.txt").stat().st_ino == inode
    assert git(clone, "for-each-ref", "refs/patchstack", "refs/heads/dcp-stack") == ""
    assert "patchstack" not in (clone / ".git/config").read_text()
    assert project.leftovers() == []


@pytest.mark.parametrize("where", ["branch", "tag", "detached", "branch that moved"])
def test_unapply_puts_head_back(project, where):
    clone = project.clone()
    pin = project.commit_of()
    if where in ("tag", "detached"):
        git(clone, "checkout", "--quiet", "--detach", TAG)
    before = git(clone, "rev-parse", "HEAD")
    branches = git(clone, "for-each-ref", "refs/heads")
    project.apply(dest=clone)
    assert git(clone, "symbolic-ref", "--short", "HEAD") == "dcp-stack"
    if where == "branch that moved":
        git(clone, "branch", "--force", "mine", OLD)
        branches = git(clone, "for-each-ref", "refs/heads/mine", "refs/heads/main")
    project.run("unapply", clone)
    assert git(clone, "rev-parse", "HEAD") == before == pin
    assert git(clone, "symbolic-ref", "--quiet", "--short", "HEAD", check=False) == ("mine" if where == "branch" else "")
    assert git(clone, "for-each-ref", "refs/heads") == branches
    assert git(clone, "stash", "list") == "" and git(clone, "status", "--porcelain") == ""


def test_unapply_after_a_fresh_apply_and_apply_again(applied):
    patched = snapshot(applied.tree)
    head = git(applied.tree, "rev-parse", "HEAD")
    applied.run("unapply", applied.tree)
    assert snapshot(applied.tree) == {**expected(upstream_files()), "vllm/_version.py": patched["vllm/_version.py"]}
    assert applied.run("unapply", applied.tree).out.startswith("already upstream")
    applied.apply("--json")
    assert snapshot(applied.tree) == patched and git(applied.tree, "rev-parse", "HEAD") == head


def test_dry_runs_change_nothing(project):
    clone = project.clone()
    before = snapshot(clone, skip=())
    assert project.apply("--dry-run", "--json", dest=clone).json["state"] == "would apply"
    assert snapshot(clone, skip=()) == before
    project.apply(dest=clone)
    before = snapshot(clone, skip=())
    assert project.run("unapply", clone, "--dry-run", "--json").json["state"] == "would unapply"
    assert snapshot(clone, skip=()) == before


@pytest.mark.parametrize("path", [OVERLAY_PATH, "vllm/gamma.py"])
@pytest.mark.parametrize("ignored", [False, True])
def test_an_untracked_file_in_the_way_is_refused(project, path, ignored):
    """An overlay file, or one that a patch creates. Also when git ignores it: git itself would overwrite it then."""
    clone = project.clone()
    write_files(clone, {path: b"precious\n"})
    if ignored:
        (clone / ".git/info").mkdir(exist_ok=True)
        (clone / ".git/info/exclude").write_text(path + "\n")
    done = project.apply(dest=clone, code=3)
    assert path in done.err and "untracked" in done.err
    assert snapshot(clone) == from_git(upstream_files()) | {path: b"precious\n"}


@pytest.mark.parametrize("state", ["edited", "staged", "deleted", "mode", "conflict"])
def test_a_dirty_tree_is_refused_by_name(project, state):
    clone = project.clone()
    path = "README.md"
    if state == "deleted":
        (clone / path).unlink()
    elif state == "mode":
        (clone / path).chmod(0o755)
    elif state == "conflict":
        commit(clone, {path: b"a\n"}, "a\n")
        git(clone, "checkout", "--quiet", "-b", "other", "HEAD~1")
        commit(clone, {path: b"b\n"}, "b\n")
        git(clone, "merge", "mine", check=False)
    else:
        (clone / path).write_text("edited\n")
        if state == "staged":
            git(clone, "add", path)
    before = snapshot(clone)
    done = project.apply(dest=clone, code=3)
    assert path in done.err and "next:" in done.err
    assert snapshot(clone) == before
    applied = project.tree
    project.apply()
    (applied / path).write_text("edited\n")
    before = snapshot(applied)
    assert path in project.run("unapply", applied, code=3).err
    assert snapshot(applied) == before


def test_the_advice_on_a_dirty_tree_works(project):
    clone = project.clone()
    write_files(clone, {"README.md": b"edited\n", OVERLAY_PATH: b"untracked\n"})
    refused = project.apply(dest=clone, code=3)
    advice = refused.err.split("`")[1]
    assert advice.startswith("git -C ")
    git(project.room, *advice.split()[1:])
    project.apply(dest=clone)


def test_a_wrong_base_is_refused_with_both_blobs(project):
    clone = project.clone()
    commit(clone, {"vllm/envs.py": b"other = 1\n"}, "other\n")
    done = project.apply(dest=clone, code=3)
    assert "vllm/envs.py" in done.err and TAG in done.err
    source = project.apply("--source", clone, "--ref", TAG, dest=project.room / "x")  # the clone has the tag: that is what is taken
    assert source.code == 0
    git(clone, "tag", "-f", TAG)
    assert "the tag was moved" in project.apply("--source", clone, dest=project.room / "y", code=3).err


def test_expected_and_found_of_a_wrong_plain_directory(project):
    clone = project.clone()
    shutil.rmtree(clone / ".git")
    (clone / "vllm/envs.py").write_text("other = 1\n")
    (clone / "vllm/crlf.py").unlink()
    done = project.apply("--source", clone, code=3)
    want = git(project.upstream, "rev-parse", f"{TAG}:vllm/envs.py")[:10]
    found = git(project.upstream, "hash-object", str(clone / "vllm/envs.py"))[:10]
    assert f"vllm/envs.py: expected {want}, found {found}" in done.err
    assert "vllm/crlf.py: expected" in done.err and "found no such file" in done.err
    assert not project.tree.exists()


def test_the_other_version_is_refused(project):
    clone = project.clone(at=OLD)
    done = project.apply(dest=clone, code=3)
    assert OLD in done.err and TAG in done.err
    assert project.apply("--ref", OLD, dest=clone).code == 0
    assert OLD in project.apply(dest=clone, code=3).err


def test_a_commit_of_ones_own_elsewhere_is_kept_below(project):
    clone = project.clone()
    own = commit(clone, {"README.md": b"own\n"}, "own\n")
    assert project.apply("--json", dest=clone).json["level"] == "touched"
    assert git(clone, "rev-parse", "refs/patchstack/base") == own
    project.run("unapply", clone)
    assert git(clone, "rev-parse", "HEAD") == own and git(clone, "symbolic-ref", "--short", "HEAD") == "mine"


def test_a_linked_worktree_is_refused(project):
    clone = project.clone()
    git(clone, "worktree", "add", "--quiet", "--detach", "../linked", TAG)
    linked = clone.parent / "linked"
    before = snapshot(linked)
    assert "linked worktree" in project.apply(dest=linked, code=3).err
    assert snapshot(linked) == before
    assert project.run("status", linked, "--json").json["state"] == "unapplied"


def test_a_directory_with_other_things_is_refused(project):
    (project.room / "work/full").mkdir()
    (project.room / "work/full/x").write_text("x")
    project.apply(dest=project.room / "work/full", code=3)
    assert [p.name for p in (project.room / "work/full").iterdir()] == ["x"]
    (project.room / "work/file").write_text("x")
    project.apply(dest=project.room / "work/file", code=None)
    assert (project.room / "work/file").read_text() == "x"


def test_an_empty_directory_is_used(project):
    project.tree.mkdir(parents=True)
    project.apply()
    assert project.run("status", project.tree, "--json").json["state"] == "applied"


@pytest.mark.parametrize("relative", ["tree", "./tree/", "other/../tree"])
def test_spellings_of_dest(project, relative):
    (project.room / "work/other").mkdir(parents=True)
    project.run("apply", "--dest", relative, cwd=project.room / "work")
    project.run("unapply", relative, cwd=project.room / "work")
    assert project.run("status", project.tree, "--json").json["state"] == "unapplied"


def test_through_a_symbolic_link(project):
    clone = project.clone()
    (project.room / "link").symlink_to(clone)
    project.apply(dest=project.room / "link")
    assert (project.room / "link").is_symlink() and (clone / OVERLAY_PATH).read_bytes() == OVERLAY[OVERLAY_PATH]
    project.run("unapply", project.room / "link")
    assert snapshot(clone) == from_git(upstream_files())


def test_a_name_with_unusual_characters(project):
    target = project.room / "work" / "a [b] 'c' \u00fc*$(x)"
    project.apply(dest=target)
    project.run("unapply", target)
    project.apply(dest=target)
    assert (target / OVERLAY_PATH).exists() and project.leftovers() == []


def test_from_inside_the_tree(applied):
    """The same shell, in the same directory, sees upstream's files afterwards."""
    inode = applied.tree.stat().st_ino
    done = applied.run("unapply", ".", cwd=applied.tree, prefix=("sh", "-c", '"$@" && pwd && ls vllm', "sh"))
    assert "old.py" in done.out.split() and "gamma.py" not in done.out.split() and str(applied.tree) in done.out.split()
    assert applied.tree.stat().st_ino == inode
    assert applied.run("status", applied.tree, "--json").json["state"] == "unapplied"


def test_unapply_with_commits_of_ones_own_is_refused(applied):
    commit(applied.tree, {"README.md": b"mine\n"}, message("delta", "[Doc] Delta"))
    before = snapshot(applied.tree)
    done = applied.run("unapply", applied.tree, code=3)
    assert "export" in done.err and snapshot(applied.tree) == before


def test_unapply_without_its_record(applied):
    git(applied.tree, "config", "--remove-section", "patchstack")
    applied.run("unapply", applied.tree)
    assert (applied.tree / LINK).exists() and applied.run("status", applied.tree, "--json").json["state"] == "unapplied"


def test_a_newer_stack_replaces_an_older_one(project):
    """The stack changes while a tree has its last version: `apply` brings the tree up to date."""
    project.apply()
    project.apply(dest=project.room / "edit")
    commit(project.room / "edit", {"vllm/new_one.py": b"# SPDX-License-Identifier: Apache-2.0\n"}, message("delta", "[Core] Delta"))
    project.run("export", project.room / "edit")
    assert project.run("status", project.tree, "--json", code=None).json["state"] != "applied"
    write_files(project.tree, {"vllm/new_one.py": b"precious\n"})
    assert "vllm/new_one.py" in project.apply(code=3).err
    (project.tree / "vllm/new_one.py").unlink()
    project.apply()
    assert git(project.tree, "rev-parse", "HEAD^{tree}") == git(project.room / "edit", "rev-parse", "HEAD^{tree}")
    project.run("unapply", project.tree)
