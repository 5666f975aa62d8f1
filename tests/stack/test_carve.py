# SPDX-License-Identifier: Apache-2.0
"""`carve`, and what `drift --history` reads from it: upstream's names of the commits, patch-ids, merged pull requests."""
import os
import pathlib
import shutil
import sys

import pytest

from .project import FILES, OLD, TAG, git
from .releases import CLASH, NEAR, NEW, STATE, TAKEN, add_patch, digest, drift, killer, release

pytest.importorskip("git_filter_repo")
PATHS = sorted({STATE, "vllm/envs.py", "vllm/crlf.py", "vllm/no_newline.py", "vllm/gamma.py", "vllm/old.py", "docs/a file.md"})


@pytest.fixture
def carved(project):
    """(project, carved repository) of a clone whose upstream has two commits on alpha's file and many on others."""
    release(project, {"README.md": b"# 1\n"}, CLASH, {"README.md": b"# 2\n"}, messages=["[Doc] One (#11)\n", "[Core] Another function beside it (#12)\n", "[Doc] Two (#13)\n"])
    return project, carve(project)


def carve(project, name: str = "carved.git") -> pathlib.Path:
    out = project.room / name
    project.run("carve", project.upstream, "--out", out)
    return out


def test_only_touched_paths_stay_with_their_history(carved):
    project, out = carved
    before = digest(project.upstream)
    told = project.run("carve", "--json", project.upstream, "--out", project.room / "again.git").json
    assert told == {"schema": 1, "command": "carve", "out": str(project.room / "again.git"), "paths": len(PATHS), "commits_before": 5, "commits_after": 3}
    assert digest(project.upstream) == before  # the clone is only read
    for tag in (OLD, TAG, NEW):
        assert set(git(out, "-c", "core.quotePath=false", "ls-tree", "-r", "--name-only", tag).splitlines()) <= set(PATHS)
    assert git(out, "log", "--format=%s", f"{TAG}..{NEW}") == "[Core] Another function beside it (#12)"


def test_blob_ids_stay_and_the_map_names_upstreams_commits(carved):
    project, out = carved
    assert git(out, "rev-parse", f"{NEW}:{STATE}") == git(project.upstream, "rev-parse", f"{NEW}:{STATE}")
    rows = dict(line.split() for line in (out / "filter-repo/commit-map").read_text().splitlines()[1:])
    clash = git(project.upstream, "log", "-1", "--format=%H", "--grep=#12", NEW)
    assert rows[clash] == git(out, "rev-parse", NEW) and rows.keys() == set(git(project.upstream, "rev-list", "--all").split())


def test_a_carved_repository_is_enough_for_three_way(carved):
    """The patches' index lines name blobs that it has: git can merge in it with nothing else."""
    project, out = carved
    git(project.room, "clone", "--quiet", "--no-local", str(out), "work/small")
    small = project.room / "work/small"
    git(small, "checkout", "--quiet", "-B", "here", NEW)
    git(small, "am", "--3way", str(project.folder() / "alpha.patch"), check=False)
    assert git(small, "diff", "--name-only", "--diff-filter=U") == STATE and "<<<<<<<" in (small / STATE).read_text()


def test_the_conflict_names_the_upstream_commit_and_pull_request(carved):
    project, out = carved
    told = drift(project, NEW, extra=("--history", out))
    clash = git(project.upstream, "log", "-1", "--format=%H", "--grep=#12", NEW)
    region, = told["alpha"]["regions"]
    assert region["moved_by"] == f"{clash[:12]} [Core] Another function beside it (#12)"
    assert f"moved by {clash[:12]}" in project.run("drift", "--ref", NEW, "--history", out, code=1).out
    page = project.room / "page.html"
    project.run("drift", "--ref", NEW, "--history", out, "--html", page, code=1)
    assert f"moved by upstream {clash[:12]}" in page.read_text()


def test_the_newest_commit_that_changed_the_lines_is_named(project):
    release(project, CLASH, {STATE: CLASH[STATE].replace(b"    return 1\n", b"    return 2\n")}, messages=["First (#21)\n", "Second (#22)\n"])
    region, = drift(project, NEW, extra=("--history", carve(project)))["alpha"]["regions"]
    assert region["moved_by"].endswith(("First (#21)", "Second (#22)"))


# ---- two of the four signals need history


def test_signal_patch_id(project):
    """Upstream took the very change and then wrote around it: it neither reverses nor merges to nothing."""
    later = TAKEN[STATE].replace(b"    return len(_GROUP[0])\n", b"    return 0 if _GROUP is None else len(_GROUP[0])\n")
    release(project, TAKEN, {STATE: later}, messages=["[Core] Taken (#31)\n", "[Core] Reworked (#32)\n"])
    assert drift(project, NEW)["alpha"]["state"] == "conflict"
    told = drift(project, NEW, extra=("--history", carve(project)))["alpha"]
    taken = git(project.upstream, "log", "-1", "--format=%H", "--grep=#31", NEW)
    assert told["state"] == "already-upstream" and told["signals"][0] == f"patch-id: the same change is upstream's {taken[:12]} [Core] Taken (#31)"
    assert told["regions"] == []


def test_a_change_that_upstream_took_and_reverted_is_still_needed(project):
    release(project, TAKEN, {STATE: FILES[STATE]}, messages=["[Core] Taken (#31)\n", "Revert it (#32)\n"])
    told = drift(project, NEW, extra=("--history", carve(project)))["alpha"]
    assert told["state"] == "clean" and "patch-id" in told["signals"][0] and "reverted" in told["signals"][0]


def test_signal_declared_pull_request_was_merged(project):
    add_patch(project, "delta", {"README.md": b"# ours\n"}, trailers={"Upstream-Status": "Submitted [vllm-project/vllm#77]"})
    add_patch(project, "eta", {"vllm/latin1.txt": b"eta\n"}, trailers={"Retire-When": "pin contains vllm-project/vllm#78"})
    add_patch(project, "theta", {"setup.py": b"theta = 1\n"}, trailers={"Upstream-Status": "Submitted [vllm-project/vllm#7]"})
    release(project, {"README.md": b"# theirs, reworked\n"}, {"vllm/latin1.txt": b"other\n"}, messages=["[Core] Ours, reworked (#77)\n", "[Core] More (#78)\n\nIt mentions (#7) in its body.\n"])
    told = drift(project, NEW, extra=("--history", carve(project)))
    merged = {n: git(project.upstream, "log", "-1", "--format=%H", f"--grep=(#{n})$", NEW)[:12] for n in (77, 78)}
    assert told["delta"]["state"] == "conflict" and told["delta"]["signals"] == [f"declared: pull request 77 was merged as {merged[77]} [Core] Ours, reworked (#77)"]
    assert told["eta"]["signals"] == [f"declared: pull request 78 was merged as {merged[78]} [Core] More (#78)"]
    assert told["theta"]["signals"] == [] and told["alpha"]["signals"] == []


# ---- refusals


def test_dry_run_lists_the_paths_and_makes_nothing(project):
    before = digest(project.root)
    assert project.run("carve", project.upstream, "--dry-run").out.splitlines() == PATHS
    assert project.run("carve", project.upstream, "--dry-run", "--json").json["paths"] == PATHS
    assert digest(project.root) == before


def test_no_clone_a_shallow_one_and_an_existing_target_are_refused(carved):
    project, out = carved
    assert "not a git clone" in project.run("carve", project.room / "nowhere", code=2).err
    assert "not a git clone" in project.run("carve", project.room / "home", code=2).err
    git(project.room, "clone", "--quiet", "--depth=1", f"file://{project.upstream}", "shallow")
    assert "--unshallow" in project.run("carve", project.room / "shallow", code=3).err
    assert "exists already" in project.run("carve", project.upstream, "--out", out, code=3).err


def test_without_git_filter_repo_the_command_to_install_it_is_named(project):
    (project.root / "apply.py").write_text((project.root / "apply.py").read_text().replace("from patchstack.cli", "sys.modules['git_filter_repo'] = None\nfrom patchstack.cli"))
    done = project.run("carve", project.upstream, code=2)
    assert f"{sys.executable} -m pip install git-filter-repo==" in done.err


def test_history_that_is_not_carved_or_lacks_the_release(carved):
    project, out = carved
    assert "python apply.py carve" in project.run("drift", "--ref", NEW, "--history", project.upstream, code=2).err
    shutil.copytree(out, project.room / "less.git")
    git(project.room / "less.git", "tag", "-d", NEW)
    assert NEW in project.run("drift", "--ref", NEW, "--history", project.room / "less.git", code=3).err


@pytest.mark.parametrize("which", ["clone --bare", "rev-list --all"])
def test_killed_and_run_again(project, which):
    release(project, NEAR)
    out = project.room / "work" / "carved.git"
    project.run("carve", project.upstream, "--out", out, env=killer(project, which, when="after"), code=-9)
    assert not out.exists()
    project.run("carve", project.upstream, "--out", out)
    assert (out / "filter-repo/commit-map").exists() and project.leftovers() == []


def test_the_user_configuration_does_not_matter(project):
    (project.home / ".gitconfig").write_text("[init]\n\tdefaultBranch = odd\n[log]\n\tshowSignature = true\n[commit]\n\tgpgSign = true\n[diff]\n\tnoprefix = true\n")
    release(project, TAKEN, messages=["[Core] Taken (#31)\n"])
    told = drift(project, NEW, extra=("--history", carve(project)))["alpha"]
    assert [s.split(":")[0] for s in told["signals"]] == ["patch-id", "reverse"]


def test_bare_and_worktree_sources(project):
    release(project, NEAR)
    git(project.room, "clone", "--quiet", "--bare", "upstream", "bare.git")
    project.run("carve", project.room / "bare.git", "--out", project.room / "a.git")
    git(project.upstream, "worktree", "add", "--quiet", "--detach", str(project.room / "linked"))
    project.run("carve", project.room / "linked", "--out", project.room / "b.git")
    assert git(project.room / "a.git", "rev-parse", NEW) == git(project.room / "b.git", "rev-parse", NEW)
    assert os.listdir(project.temp) == []
