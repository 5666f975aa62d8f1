# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every step: the tree is upstream, patched, or `status` says `interrupted`; the next run ends whole and leaves nothing."""
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from . import kills
from . import project as fake
from .kills import every_kill
from .project import OVERLAY_PATH, commit, expected, git, message, snapshot, upstream_files, write_files

OWN = {"notes.txt": b"untracked\n", "ignored/x.log": b"ignored\n"}
LEAST = 260  # kills of each of four commands, with VLLM_STACK_KILLS=all


def status(project, tree: pathlib.Path) -> str:
    """What `status` says, which changes nothing."""
    for last in (False, True):
        before = snapshot(tree, skip=())
        done = project.run("status", tree, "--json", code=None)
        if snapshot(tree, skip=()) == before:
            break
        assert not last  # once it may be a program that outlived the killed run: `status` has waited for it
    assert done.code == (0 if done.json["state"] in ("applied", "unapplied") else 1), done
    return done.json["state"]


@pytest.fixture
def small(project) -> fake.Project:
    """One patch and the overlay: fewer steps, the same kinds."""
    tree = project.clone("cut")
    subject, author, edits = fake.EDITS["beta"]
    commit(tree, edits, message("beta", subject), author)
    project.run("export", tree, "--base", fake.TAG, "--allow-drop")
    shutil.rmtree(tree)
    return project


def small_files() -> dict[str, bytes]:
    return upstream_files() | fake.EDITS["beta"][2] | fake.OVERLAY


def leftovers(project, *trees: pathlib.Path) -> list[str]:
    """Scratch places, locks and journals that a run should have removed, here and in git directories."""
    found = project.leftovers() + [str(p) for p in project.temp.iterdir()]
    for tree in trees:
        found += [str(p.relative_to(tree)) for p in tree.rglob("*") if "patchstack-" in p.name or p.name.endswith(".lock") or p.name.startswith("tmp_") or p == tree / ".git" / "patchstack"]
    return found


def test_fresh_apply(small):
    def reset() -> None:
        shutil.rmtree(small.room / "work")
        (small.room / "work").mkdir()

    for where in every_kill(small, "apply", "--dest", small.tree, reset=reset, least=LEAST):
        if small.tree.exists():
            assert {k: v for k, v in snapshot(small.tree).items() if k != "vllm/_version.py"} == expected(small_files()), where
            assert status(small, small.tree) == "applied", where
        small.apply()
        assert status(small, small.tree) == "applied", where
        assert leftovers(small, small.tree) == [], where


def whole(small, tree: pathlib.Path, files: dict[str, bytes], branch: str, where: str) -> None:
    """The tree holds `files` and what is the user's own, its index and its branches agree, nothing else is left."""
    assert snapshot(tree) == files, where
    assert git(tree, "status", "--porcelain", "--untracked-files=all") == "?? notes.txt", where
    assert git(tree, "symbolic-ref", "--short", "HEAD") == branch, where
    assert git(tree, "fsck", "--no-dangling") == "", where
    assert leftovers(small, tree) == [], where


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_in_place(small, command):
    """The next run may be the same command or the opposite one: it first finishes or takes back, says which, and then does its own work."""
    pristine = small.clone("pristine")
    write_files(pristine, OWN)
    if command == "unapply":
        small.apply(dest=pristine)
    target = small.room / "work" / "mine"

    def reset() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pristine, target, symlinks=True)

    upstream, patched = expected(upstream_files(), link=True) | OWN, expected(small_files(), link=True) | OWN
    before, after = (upstream, patched) if command == "apply" else (patched, upstream)
    inodes = {path: None for path in OWN}
    arguments = ("apply", "--dest", target) if command == "apply" else ("unapply", target)
    said = set()
    for number, where in enumerate(every_kill(small, *arguments, reset=reset, least=LEAST)):
        inodes = {path: (target / path).stat().st_ino for path in OWN}
        found, state = snapshot(target), status(small, target)
        assert {path: found.get(path) for path in OWN} == OWN, where
        untouched = before.keys() & after.keys() - {path for path in before if before[path] != after.get(path)}
        assert {path: found.get(path) for path in untouched} == {path: before[path] for path in untouched}, where
        assert state == "interrupted" or (found in (before, after) and state == ("applied" if found == patched else "unapplied")), (where, state)
        if number % 2:
            done = small.apply(dest=target)
            whole(small, target, patched, "dcp-stack", where)
        else:
            done = small.run("unapply", target)
            whole(small, target, upstream, "mine", where)
        told = [line for line in done.err.splitlines() if line.endswith("which had been interrupted")]
        assert len(told) == (state == "interrupted"), (where, done)
        said |= {line.split(": ")[1].split(" ")[0] for line in told}
        assert inodes == {path: (target / path).stat().st_ino for path in OWN}, where
    assert said == {"finished", "took"}


@pytest.mark.parametrize("source", ["pypi", "git"])
def test_the_import_into_the_cache(small, source):
    def reset() -> None:
        shutil.rmtree(small.cache)
        (small.cache / "bases").mkdir(parents=True)
        (small.cache / "downloads").mkdir()
        shutil.rmtree(small.room / "work")
        (small.room / "work").mkdir()

    kept = small.room / "kept"
    if source == "pypi":  # not through pip each time: it takes seconds
        small.apply("--source", "pypi")
        shutil.copytree(small.cache / "downloads", kept)
        plain = reset

        def reset() -> None:
            plain()
            shutil.copytree(kept, small.cache / "downloads", dirs_exist_ok=True)

    for where in every_kill(small, "apply", "--dry-run", "--source", source, "--dest", small.tree, reset=reset):
        assert not small.tree.exists(), where
        small.apply("--source", source)
        assert {k: v for k, v in snapshot(small.tree).items() if k != "vllm/_version.py"} == expected(small_files(), link=source == "git"), where
        assert leftovers(small, small.tree) == [], where


def test_the_download(small):
    """pip is one step of its own."""
    shutil.rmtree(small.cache)
    names = kills.steps(small, "apply", "--source", "pypi", "--dest", small.tree)
    pip = next(i for i, name in enumerate(names, 1) if "pip download" in name)
    for number, how in ((pip - 1, "before"), (pip, "before"), (pip, "during"), (pip + 1, "before"), (pip + 2, "before")):
        shutil.rmtree(small.cache)
        shutil.rmtree(small.room / "work")
        assert kills.killed(small, number, how, "apply", "--source", "pypi", "--dest", small.tree).returncode == -9
        assert not small.tree.exists()
        small.apply("--source", "pypi")
        assert leftovers(small, small.tree) == []


def test_export(small):
    """The next run, an export or any that reads patches/, finds the old files, the new ones, or first makes them one of both."""
    small.apply(dest=small.room / "work" / "edit")
    edit, pristine = small.room / "work" / "edit", small.room / "pristine"
    overlay = fake.OVERLAY[OVERLAY_PATH] + b"# edited\n"
    commit(edit, {"README.md": b"delta\n"}, message("delta", "[Doc] Delta"))
    commit(edit, {OVERLAY_PATH: overlay}, message("overlay", "[Overlay] Edit"))
    for part in ("project", "work"):
        shutil.copytree(small.room / part, pristine / part, symlinks=True)

    def reset() -> None:
        for part in ("project", "work"):
            shutil.rmtree(small.room / part)
            shutil.copytree(pristine / part, small.room / part, symlinks=True)

    def everything() -> tuple[dict[str, bytes], bytes]:
        return small.patches(), (small.root / "vllm_overlay" / OVERLAY_PATH).read_bytes()

    reset()
    before = everything()
    small.run("export", edit)
    after = everything()
    assert before != after and "delta.patch" in after[0]
    tree = snapshot(edit)
    for number, where in enumerate(every_kill(small, "export", edit, reset=reset, least=LEAST)):
        if everything() not in (before, after):
            looked = small.run("lint", code=3)
            assert "was interrupted" in looked.err and small.run("lint", code=3).err == looked.err, where
        if number % 2:
            small.apply(dest=small.room / "work" / "other")  # needs patches that agree with their lock
            assert everything() in (before, after), where
            shutil.rmtree(small.room / "work" / "other")
        small.run("export", edit)
        assert everything() == after and leftovers(small, edit) == [], where
        assert snapshot(small.root / "vllm_overlay") == {OVERLAY_PATH: overlay}, where
        assert snapshot(edit) == tree
        small.run("unapply", edit)  # export has recorded that the tree's commits are saved


@pytest.mark.realpin
def test_the_real_pin(tmp_path):
    """Kills at random moments of apply and unapply in place on the real pin; after each, one more command ends whole."""
    script = [sys.executable, str(fake.REPOSITORY / "apply.py")]
    tree, temp = tmp_path / "tree", tmp_path / "temp"
    temp.mkdir()
    env = {**os.environ, "TMPDIR": str(temp)}

    def run(*args: object) -> subprocess.CompletedProcess:
        return subprocess.run([*script, *map(str, args)], env=env, capture_output=True, text=True)

    assert run("apply", "--dest", tree).returncode == 0
    chance, total, state = random.Random(20), 0, "applied"
    while total < (60 if kills.ALL else 4):
        command = ("unapply", tree) if state == "applied" else ("apply", "--dest", tree)
        started = subprocess.Popen([*script, *map(str, command)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            started.wait(chance.uniform(0.1, 1.2))
        except subprocess.TimeoutExpired:
            (os.killpg if total % 2 else os.kill)(started.pid, 9)
            total += 1
        started.wait()
        command = ("unapply", tree) if total % 3 else ("apply", "--dest", tree)
        done = run(*command)
        assert done.returncode == 0, done.stderr
        found = run("status", tree, "--json")
        state = "unapplied" if total % 3 else "applied"
        assert f'"state": "{state}"' in found.stdout and '"level": "exact"' in found.stdout, found.stdout
        assert git(tree, "status", "--porcelain", "--untracked-files=all") == ""
        assert [p.name for p in (tree / ".git").iterdir() if "patchstack" in p.name or p.name.endswith(".lock")] == [] and list(temp.iterdir()) == []
