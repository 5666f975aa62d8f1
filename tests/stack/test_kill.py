# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every step: the tree is upstream or patched, `status` knows it, the next run succeeds and cleans up."""
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from . import project as fake
from .project import OVERLAY_PATH, commit, expected, git, message, snapshot, upstream_files, write_files

KILLER = pathlib.Path(__file__).with_name("killer.py")
OWN = {"notes.txt": b"untracked\n", "ignored/x.log": b"ignored\n"}


def killed(project, number: int, *args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(KILLER), str(number), str(project.root), *map(str, args)]
    return subprocess.run(command, cwd=project.room, env=project.environment(), capture_output=True, timeout=60, text=True)


def every_kill(project, *args: object, reset):
    """Yield after each kill; `reset()` makes the state before the command. Ends when the command was not killed any more."""
    total = 0
    reset()
    names = [line for line in killed(project, 0, *args).stderr.splitlines() if line.startswith("STEP ")]
    assert len(names) > 10, names
    for number in (n for n in range(1, len(names) + 1) for n in (n, -n)):
        if number < 0 and not names[-number - 1].startswith("STEP git"):
            continue
        if number < 0 and not any(word in names[-number - 1] for word in ("reset", "read-tree -m", "fast-import", "update-ref", "repack", "fetch")):
            continue  # the others write into a scratch index only
        reset()
        done = killed(project, number, *args)
        if number < 0 and done.returncode == 0:
            continue  # over before the kill
        assert done.returncode == -signal.SIGKILL, (number, names[abs(number) - 1], done.returncode, done.stderr)
        total += 1
        yield f"{number} {names[abs(number) - 1]}"
    assert total >= len(names)


def status(project, tree: pathlib.Path) -> str:
    return project.run("status", tree, "--json", code=None).json["state"]


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


def test_fresh_apply(small):
    def reset() -> None:
        shutil.rmtree(small.room / "work")
        (small.room / "work").mkdir()

    for where in every_kill(small, "apply", "--dest", small.tree, reset=reset):
        if small.tree.exists():
            assert {k: v for k, v in snapshot(small.tree).items() if k != "vllm/_version.py"} == expected(small_files()), where
            assert status(small, small.tree) == "applied", where
        small.apply()
        assert status(small, small.tree) == "applied", where
        assert small.leftovers() == [], where


def test_in_place_apply(small):
    pristine = small.clone("pristine")
    write_files(pristine, OWN)
    target = small.room / "work" / "mine"

    def reset() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pristine, target, symlinks=True)

    before, after = expected(upstream_files(), link=True) | OWN, expected(small_files(), link=True) | OWN
    for where in every_kill(small, "apply", "--dest", target, reset=reset):
        found = snapshot(target)
        assert found in (before, after), where
        assert status(small, target) == ("applied" if found == after else "unapplied"), where
        small.apply(dest=target)
        assert snapshot(target) == after and small.leftovers() == [], where


def test_unapply(small):
    pristine = small.clone("pristine")
    write_files(pristine, OWN)
    small.apply(dest=pristine)
    target = small.room / "work" / "mine"

    def reset() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pristine, target, symlinks=True)

    before, after = expected(upstream_files(), link=True) | OWN, expected(small_files(), link=True) | OWN
    for where in every_kill(small, "unapply", target, reset=reset):
        found = snapshot(target)
        assert found in (before, after), where
        assert status(small, target) == ("applied" if found == after else "unapplied"), where
        small.run("unapply", target)
        assert snapshot(target) == before and small.leftovers() == [], where
        assert git(target, "symbolic-ref", "--short", "HEAD") == "mine", where


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
        assert small.leftovers() == [], where


def test_the_download(small):
    """pip is one step of its own."""
    shutil.rmtree(small.cache)
    steps = [line for line in killed(small, 0, "apply", "--source", "pypi", "--dest", small.tree).stderr.splitlines() if line.startswith("STEP ")]
    pip = next(i for i, line in enumerate(steps, 1) if "pip download" in line)
    for number in (pip - 1, pip, -pip, pip + 1, pip + 2):
        shutil.rmtree(small.cache)
        shutil.rmtree(small.room / "work")
        assert killed(small, number, "apply", "--source", "pypi", "--dest", small.tree).returncode == -signal.SIGKILL
        assert not small.tree.exists()
        small.apply("--source", "pypi")
        assert small.leftovers() == []


def test_export(small):
    """patches/ is the old one or the new one at every moment; the overlay file too."""
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

    reset()
    before = small.patches()
    small.run("export", edit)
    after = small.patches()
    assert before != after and "delta.patch" in after
    tree = snapshot(edit)
    for where in every_kill(small, "export", edit, reset=reset):
        found = small.patches()
        assert found in (before, after), where
        written = (small.root / "vllm_overlay" / OVERLAY_PATH).read_bytes()
        assert written in (overlay, fake.OVERLAY[OVERLAY_PATH]), where
        assert found != after or written == overlay, where
        small.run("export", edit)
        assert small.patches() == after and small.leftovers() == [], where
        assert snapshot(small.root / "vllm_overlay") == {OVERLAY_PATH: overlay}, where
        assert snapshot(edit) == tree
        small.run("unapply", edit)  # export has recorded that the tree's commits are saved
