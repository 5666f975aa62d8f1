# SPDX-License-Identifier: Apache-2.0
"""A stranger's tree in which something lies in wait where a run of ours writes: nothing outside the tree changes, also where root runs it."""
import hashlib
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from . import project as fake
from .project import expected, git, patched_files, snapshot, upstream_files, write_files
from .test_file_by_file import PATCHED, UPSTREAM, at_step, kills, root_only

OUTSIDE = {"precious": b"1\n", "deep/er": b"2\n", "index": b"3\n", "old/0": b"4\n"}
LINKS = (".git", ".git/refs", ".git/refs/heads", ".git/refs/patchstack", ".git/logs", ".git/logs/HEAD", ".git/objects", ".git/objects/pack", ".git/config", ".git/HEAD", ".git/index", ".git/packed-refs", ".git/patchstack")


@pytest.fixture
def outside(project) -> pathlib.Path:
    folder = project.room / "outside"
    write_files(folder, OUTSIDE)
    return folder


@pytest.mark.parametrize("part", LINKS)
def test_a_part_of_the_repository_that_is_a_link_is_refused(project, part):
    """What git or we write there would land elsewhere; the way that the message names works."""
    clone, elsewhere = project.clone(), project.room / "elsewhere"
    if part == ".git/HEAD":  # as very old versions of git made it
        (clone / part).unlink()
        (clone / part).symlink_to("refs/heads/mine")
    else:
        git(clone, "pack-refs", "--all")
        (clone / part).rename(elsewhere) if (clone / part).exists() else elsewhere.mkdir()
        (clone / part).symlink_to(elsewhere)
    before = snapshot(project.room, skip=("cache", "temp"))
    done = project.apply(dest=clone, code=3)
    assert f"{clone / part} is a link" in done.err and "Traceback" not in done.err
    assert snapshot(project.room, skip=("cache", "temp")) == before
    if part != ".git/patchstack":
        assert project.run("status", clone, "--json").json["state"] == "unapplied"
        project.apply("--source", clone)


def test_a_desk_that_is_a_link_is_not_cleared(applied, outside):
    """`apply` has nothing to do, and tidies."""
    (applied.tree / ".git/patchstack").symlink_to(outside)
    applied.apply(code=None)
    applied.run("unapply", applied.tree, code=None)
    assert snapshot(outside) == OUTSIDE


@pytest.mark.parametrize("name", ["journal.json.new", "index", "index.token", "object", "old"])
def test_links_at_the_desk_are_not_followed(project, outside, name):
    clone = project.clone()
    desk = clone / ".git/patchstack"
    desk.mkdir()
    (desk / name).symlink_to(outside / "precious" if name != "old" else outside / "old")
    (desk / "theirs").write_text("not ours\n")
    project.apply(dest=clone)
    assert snapshot(outside) == OUTSIDE and snapshot(clone) == PATCHED
    assert [p.name for p in desk.iterdir()] == ["theirs"]  # nor is anything removed that no run of ours leaves
    project.run("unapply", clone)
    assert snapshot(clone) == UPSTREAM


def journal(project) -> tuple[pathlib.Path, dict]:
    """A clone in which `apply` was killed between two renames, and its journal."""
    clone = project.clone()
    shutil.copytree(clone, project.room / "copy", symlinks=True)
    names = kills.steps(project, "apply", "--dest", project.room / "copy")
    shutil.rmtree(project.room / "copy")
    assert kills.killed(project, at_step(names, "replace", 2) + 4, "before", "apply", "--dest", clone).returncode == -9
    return clone, json.loads((clone / ".git/patchstack/journal.json").read_text())


@pytest.mark.parametrize("path", ["../../outside/precious", "/absolute", ".git/hooks/post-checkout", "vllm/../../../outside/precious"])
@pytest.mark.parametrize("what", ["remove", "put back"])
def test_a_journal_that_leads_out_of_the_tree_counts_as_damaged(project, outside, path, what):
    clone, told = journal(project)
    if path == "/absolute":
        path = str(outside / "precious")
    blob = f"100644 {git(clone, 'hash-object', '--stdin', input=OUTSIDE['precious'])}"
    change = {"path": path, "before": blob, "after": None, "temporary": ".precious.patchstack-0123456789ab", "owner": [-1, -1], "bits": 0o644}
    told |= {"changes": [change], "phase": "renaming" if what == "remove" else "preparing"}
    if what == "put back":
        (outside / "precious").unlink()
    before = snapshot(outside)
    (clone / ".git/patchstack/journal.json").write_text(json.dumps(told))
    (clone / ".git/patchstack/old/0").write_bytes(OUTSIDE["precious"])
    done = project.apply(dest=clone, code=None)
    assert "journal.json is damaged and counts as absent" in done.err
    assert snapshot(outside) == before and not (clone / ".git/hooks/post-checkout").exists()


@pytest.mark.parametrize("edit", [{"temporary": "../../outside/precious"}, {"temporary": "envs.py"}, {"command": "\x1b[2J"}, {"made": ["../../outside/new"]}, {"emptied": ["../../outside/deep"]}])
def test_other_things_that_no_run_writes_into_a_journal(project, outside, edit):
    clone, told = journal(project)
    if "temporary" in edit:
        told["changes"][0] |= edit
    else:
        told |= edit
    (clone / ".git/patchstack/journal.json").write_text(json.dumps(told))
    assert "interrupted" not in project.run("status", clone, code=None).out
    assert "counts as absent" in project.apply(dest=clone, code=None).err
    assert snapshot(outside) == OUTSIDE


def test_the_journal_of_another_user_is_not_carried_out(project):
    """It could give root's files away, or make a program of its own root's."""
    root_only()
    clone, told = journal(project)
    subprocess.run(["chown", "-R", "1234:2345", str(clone)], check=True)
    before = snapshot(clone, skip=())
    assert project.run("status", clone, "--json", code=1).json["state"] == "interrupted"
    for command in (("apply", "--dest", clone), ("unapply", clone), ("export", clone, "--base", fake.TAG)):
        done = project.run(*command, code=3)
        assert "user 1234 had run it" in done.err
        assert snapshot(clone, skip=()) == before
    os.chown(clone / ".git/patchstack/journal.json", 0, 0)
    project.apply(dest=clone)
    assert snapshot(clone) == expected(patched_files(), link=True)


def test_a_copy_of_what_was_there_that_somebody_changed_is_not_put_back(project):
    clone, told = journal(project)
    old = clone / ".git/patchstack/old"
    for path in clone.rglob(".*.patchstack-*"):
        path.unlink()  # so that it has to be taken back
    number = next(n for n, c in enumerate(told["changes"]) if c["before"] and (clone / c["path"]).exists() and c["after"] and git(clone, "hash-object", c["path"]) == c["after"].split(" ")[1])
    (old / str(number)).write_bytes(b"evil\n")
    done = project.apply(dest=clone, code=3)
    assert f"{old / str(number)}, the copy of" in done.err and b"evil\n" not in snapshot(clone).values()
    git(clone, "checkout", "--", told["changes"][number]["path"])
    project.apply(dest=clone)
    assert snapshot(clone) == PATCHED


def test_an_index_with_paths_that_lead_out_of_the_tree(project, outside):
    """git does not check what it reads there; line ends are looked up in every .gitattributes of it."""
    clone = project.clone()
    (clone / "README.md").write_bytes(b"edited\r\n")  # a candidate for line ends
    target = "../../outside/.gitattributes"
    evil = f"{'v' * (len(target) - len('/.gitattributes'))}/.gitattributes"
    blob = git(clone, "hash-object", "-w", "--stdin", input=b"* text\n")
    git(clone, "update-index", "--add", "--cacheinfo", f"100644,{blob},{evil}")
    index = (clone / ".git/index").read_bytes()
    index = index[:-20].replace(evil.encode(), target.encode())
    (clone / ".git/index").write_bytes(index + hashlib.sha1(index).digest())
    for command in (("status", clone), ("apply", "--dest", clone), ("unapply", clone)):
        done = project.run(*command, code=None)
        assert done.code in (1, 3) and "Traceback" not in done.err
    assert snapshot(outside) == OUTSIDE and list(project.temp.iterdir()) == []


def test_a_clone_without_logs_stays_the_user_s(project):
    """git makes that folder."""
    root_only()
    clone = project.clone()
    shutil.rmtree(clone / ".git/logs")
    subprocess.run(["chown", "-R", "1234:2345", str(clone)], check=True)
    for command in (("apply", "--dest", clone), ("unapply", clone)):
        project.run(*command)
        assert {(p.lstat().st_uid, p.lstat().st_gid) for p in [clone, *clone.rglob("*")]} == {(1234, 2345)}
    assert snapshot(clone) == expected(upstream_files(), link=True)
