# SPDX-License-Identifier: Apache-2.0
"""`apply` into a new place: every source, the cache, references to the pin, idempotence, concurrency."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

from . import project as fake
from .project import OLD, TAG, expected, git, patched_files, snapshot


def unpacked(project) -> pathlib.Path:
    """The sdist, unpacked by tar."""
    with tarfile.open(project.sdist()) as archive:
        archive.extractall(project.room / "unpacked", filter="data")
    return project.room / "unpacked" / f"vllm-{TAG[1:]}"


def without_version(files: dict[str, bytes]) -> dict[str, bytes]:
    return {k: v for k, v in files.items() if k != "vllm/_version.py"}


def cold(project) -> None:
    shutil.rmtree(project.cache)


# source name -> (arguments, environment, made from git)
SOURCES = {
    "pip": (lambda p: ("--source", "pypi"), {}, False),
    "sdist file": (lambda p: ("--source", p.sdist()), {}, False),
    "directory": (lambda p: ("--source", unpacked(p)), {}, False),
    "clone": (lambda p: ("--source", p.clone()), {}, True),
    "clone without the tag": (lambda p: ("--source", untagged(p)), {}, True),
    "bare repository": (lambda p: ("--source", bare(p)), {}, True),
    "linked worktree": (lambda p: ("--source", worktree(p)), {}, True),
    "shallow clone": (lambda p: ("--source", shallow(p)), {}, True),
    "file URL": (lambda p: ("--source", f"file://{p.upstream}"), {}, True),
    "git": (lambda p: ("--source", "git"), {}, True),
    "VLLM_REPO path": (lambda p: (), {"VLLM_REPO": "upstream"}, True),
    "VLLM_REPO url": (lambda p: ("--source", "git"), {"VLLM_REPO": "file://{room}/upstream"}, True),
    "VLLM_REPO directory": (lambda p: unpacked(p) and (), {"VLLM_REPO": "{room}/unpacked/vllm-1.2.3"}, False),
}


def untagged(project) -> pathlib.Path:
    clone = project.clone()
    git(clone, "tag", "-d", TAG)
    return clone


def bare(project) -> pathlib.Path:
    git(project.room, "clone", "--quiet", "--bare", "upstream", "bare.git")
    return project.room / "bare.git"


def worktree(project) -> pathlib.Path:
    git(project.upstream, "worktree", "add", "--quiet", "--detach", "../linked", OLD)
    return project.room / "linked"


def shallow(project) -> pathlib.Path:
    git(project.room, "clone", "--quiet", "--depth=1", f"file://{project.upstream}", "shallow")
    return project.room / "shallow"


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_tree(project, name):
    arguments, environment, from_git = SOURCES[name]
    cold(project)
    project.cache.mkdir()
    arguments = arguments(project)
    done = project.apply(*arguments, "--json", env={k: v.format(room=project.room) for k, v in environment.items()})
    assert done.json["level"] == ("touched" if from_git else "exact")
    assert without_version(snapshot(project.tree)) == expected(patched_files(), link=from_git)
    assert git(project.tree, "status", "--porcelain", "--untracked-files=all") == ""
    assert project.leftovers() == [] or name in ("directory", "VLLM_REPO directory")
    if not from_git:
        assert b"1.2.3" in (project.tree / "vllm/_version.py").read_bytes()
    assert git(project.tree, "fsck", "--strict", "--no-dangling") == ""


def test_the_cache_is_enough_without_index_and_network(project):
    cold(project)
    project.apply()
    shutil.rmtree(project.index)
    shutil.rmtree(project.upstream)
    (project.cache / "downloads" / "vllm-1.2.3.tar.gz").unlink()
    done = project.apply(dest=project.room / "second")
    assert "downloading" not in done.err and "fetching" not in done.err
    assert snapshot(project.room / "second") == snapshot(project.tree)


def test_the_download_alone_is_enough(project):
    cold(project)
    project.apply("--source", "pypi")
    shutil.rmtree(project.cache / "bases")
    shutil.rmtree(project.index)
    assert "downloading" not in project.apply("--source", "pypi", dest=project.room / "second").err


def test_auto_prefers_cache_then_index_then_git(project):
    cold(project)
    project.index.rename(project.room / "away")
    assert project.apply("--json", dest=project.room / "a").json["source"] == "git"
    (project.room / "away").rename(project.index)
    assert project.apply("--json", dest=project.room / "b").json["source"] == "git"  # the cache first
    cold(project)
    assert project.apply("--json", dest=project.room / "c").json["source"] == "sdist"
    assert project.apply("--json", dest=project.room / "d", env={"VLLM_REPO": str(project.upstream)}).json["source"] == "git"


def test_the_sdist_is_never_run(project):
    """setup.py of the fake sdist fails when run, its build requirements cannot be installed."""
    cold(project)
    project.apply("--source", "pypi")


def test_a_plain_directory_is_read_anew_each_time(project):
    source = unpacked(project)
    project.apply("--source", source, dest=project.room / "a")
    (source / "README.md").write_text("edited\n")
    assert project.apply("--source", source, "--json", dest=project.room / "b").json["level"] == "touched"
    assert (project.room / "b" / "README.md").read_text() == "edited\n"
    (source / "vllm/envs.py").write_text("edited\n")
    refused = project.apply("--source", source, dest=project.room / "c", code=3)
    assert "vllm/envs.py" in refused.err and not (project.room / "c").exists()
    project.apply(dest=project.room / "d")
    assert not list((project.cache / "bases").glob(".*"))


def test_dry_run_writes_nothing(project):
    before = sorted(project.room.rglob("*"))
    done = project.apply("--dry-run", "--json")
    assert done.json["state"] == "would apply"
    assert sorted(project.room.rglob("*")) == before
    assert project.apply("--json").json["commit"] == done.json["commit"]


def times(root: pathlib.Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in [root, *root.rglob("*")]}


def test_a_second_apply_writes_nothing(applied):
    before = times(applied.tree)
    done = applied.apply()
    assert done.out.startswith("already applied")
    assert times(applied.tree) == before
    assert applied.apply("--json").json["state"] == "already applied"


@pytest.mark.parametrize("spelling", ["v1.2.3", "1.2.3", "short", "full", "FULL", ""])
def test_ref_spellings(project, spelling):
    sha = project.commit_of()
    ref = {"short": sha[:7], "full": sha, "FULL": sha.upper()}.get(spelling, spelling)
    assert project.apply("--ref", ref, "--dry-run", "--json").json["base"] == TAG
    assert project.apply("--ref", OLD, "--dry-run", "--json").json["base"] == OLD


@pytest.mark.parametrize("ref", ["v9.9.9", "abcdef0123", "main", "1.2", "v1.2.3 "])
def test_an_unknown_ref_is_refused_with_the_list(project, ref):
    done = project.apply("--ref", ref, code=2)
    assert TAG in done.err and OLD in done.err and "drift" in done.err and "next:" in done.err
    assert not project.tree.parent.exists() or list(project.tree.parent.iterdir()) == []


def test_a_sha_too_short_is_refused(project):
    project.apply("--ref", project.commit_of()[:6], code=2)


def test_bases_prints_every_topic(project):
    done = project.run("bases", "--json").json
    assert [b["tag"] for b in done["bases"] if b["default"]] == [TAG]
    assert done["topics"]["gamma"] == {OLD: {"state": "upstream", "detail": "v0.9.0 (vllm-project/vllm#1)"}, TAG: {"state": "patched", "detail": ""}}
    shown = project.run("bases").out
    assert "v1.2.3 (default)" in shown and "n/a: no such file there" in shown


def test_apply_in_a_sub_directory_of_another_repository(project):
    outer = project.clone("outer", at=OLD)
    before, index = snapshot(outer), (outer / ".git/index").read_bytes()
    git_files = snapshot(outer / ".git")
    project.apply(dest=outer / "sub" / "new")
    assert without_version(snapshot(outer / "sub" / "new")) == expected(patched_files())
    shutil.rmtree(outer / "sub")
    assert snapshot(outer) == before and (outer / ".git/index").read_bytes() == index and snapshot(outer / ".git") == git_files


def test_apply_with_the_shell_inside_another_repository(project):
    outer = project.clone("outer", at=OLD)
    done = project.run("apply", "--dest", "here", cwd=outer)
    assert "applied 3 patches" in done.out
    assert without_version(snapshot(outer / "here")) == expected(patched_files())


def test_an_empty_series(project):
    (project.folder(OLD) / "series").write_text("# nothing yet\n")
    (project.folder(OLD) / "alpha.patch").unlink()
    tree = project.clone(at=OLD)
    project.run("export", tree, "--base", OLD)
    project.apply("--ref", OLD)
    assert without_version(snapshot(project.tree)) == expected(fake.old_files())


def starts(project, dest: pathlib.Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, str(project.root / "apply.py"), "apply", "--json", "--dest", str(dest), *args]
    return subprocess.Popen(command, cwd=project.room, env=project.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("source", ["auto", "pypi", "git"])
@pytest.mark.parametrize("dests", [("tree", "tree", "tree"), ("a", "b", "c")], ids=["same dest", "same cold cache"])
def test_concurrent_runs(project, dests, source):
    cold(project)
    runs = [starts(project, project.room / "work" / d, "--source", source) for d in dests]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0 or (run.returncode == 3 and len(set(dests)) == 1), (run.returncode, out, err)
        assert b"Traceback" not in err
    for dest in set(dests):
        tree = project.room / "work" / dest
        assert without_version(snapshot(tree)) == expected(patched_files(), link=source == "git")
        assert project.run("status", tree, "--json").json["state"] == "applied"
    assert project.leftovers() == []


@pytest.mark.realpin
def test_the_real_pins(tmp_path):
    """Both pinned releases, through the environment's own cache and index."""
    script = fake.REPOSITORY / "apply.py"
    bases = subprocess.run([sys.executable, str(script), "bases", "--json"], capture_output=True, check=True, text=True).stdout
    for base in json.loads(bases)["bases"]:
        tree = tmp_path / base["tag"]
        done = subprocess.run([sys.executable, str(script), "apply", "--ref", base["tag"], "--dest", str(tree)], capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        again = subprocess.run([sys.executable, str(script), "status", str(tree), "--json"], capture_output=True, text=True)
        assert again.returncode == 0 and '"applied"' in again.stdout, again.stdout + again.stderr
        assert git(tree, "status", "--porcelain") == ""
