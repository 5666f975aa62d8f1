# SPDX-License-Identifier: Apache-2.0
"""A destination that cannot be written and a disk that is full. Needs small mounts: skipped, saying so, where those are not allowed."""
import contextlib
import pathlib
import shutil
import subprocess

import pytest

from .project import expected, patched_files, snapshot, upstream_files


@contextlib.contextmanager
def mounted(folder: pathlib.Path, *options: str):
    """Mount over `folder` for the duration; skip the test where the user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small_disk(folder: pathlib.Path, kilobytes: int):
    return mounted(folder, "-t", "tmpfs", "-o", f"size={kilobytes}k", "none")


def fill(folder: pathlib.Path, leave: int) -> None:
    """Fill the disk under `folder` but for `leave` bytes."""
    free = shutil.disk_usage(folder).free
    with (folder / "filler").open("wb") as f:
        f.write(b"\0" * max(0, free - leave))


def test_a_parent_that_is_a_file(project):
    (project.room / "file").write_text("x")
    done = project.apply(dest=project.room / "file" / "tree", code=3)
    assert "cannot write" in done.err and "next:" in done.err


def test_a_read_only_destination(project):
    with mounted(project.room / "ro", "-t", "tmpfs", "-o", "ro", "none"):
        done = project.apply(dest=project.room / "ro" / "tree", code=3)
        assert "Read-only" in done.err and "next:" in done.err


def test_a_read_only_tree(project):
    """In place, below a file system that was made read-only."""
    with small_disk(project.room / "disk", 20000):
        clone = project.room / "disk" / "clone"
        shutil.copytree(project.clone(), clone, symlinks=True)
        subprocess.run(["mount", "-o", "remount,ro", str(project.room / "disk")], check=True)
        project.apply(dest=clone, code=3)
        assert project.run("status", clone, "--json").json["state"] == "unapplied"
        assert snapshot(clone) == expected(upstream_files(), link=True)


def test_a_read_only_cache(project):
    shutil.rmtree(project.cache)
    with mounted(project.cache, "-t", "tmpfs", "-o", "ro", "none"):
        assert "Read-only" in project.apply(code=3).err


@pytest.mark.parametrize("source", ["pypi", "git", "file"])
@pytest.mark.parametrize("leave", [0, 4096, 12288, 40960])
def test_a_full_disk_during_the_import(project, source, leave):
    shutil.rmtree(project.cache)
    with small_disk(project.cache, 4000):
        fill(project.cache, leave)
        done = project.apply("--source", project.sdist() if source == "file" else source, code=None)
        assert done.code == 3, done
        assert "space" in done.err and "next:" in done.err and "Traceback" not in done.err, done
        assert not project.tree.exists()
        (project.cache / "filler").unlink()
        project.apply("--source", project.sdist() if source == "file" else source)
        assert {k: v for k, v in snapshot(project.tree).items() if k != "vllm/_version.py"} == expected(patched_files(), link=source == "git")


@pytest.mark.parametrize("leave", [0, 8192, 49152, 131072])
def test_a_full_disk_during_a_fresh_apply(project, leave):
    with small_disk(project.room / "disk", 4000):
        target = project.room / "disk" / "tree"
        fill(project.room / "disk", leave)
        done = project.apply(dest=target, code=3)
        assert "space" in done.err and "Traceback" not in done.err and not target.exists(), done
        (project.room / "disk" / "filler").unlink()
        project.apply(dest=target)
        assert [p.name for p in target.parent.iterdir()] == ["tree"]


@pytest.mark.parametrize("leave", [0, 16384, 90112])
def test_a_full_disk_during_apply_in_place(project, leave):
    with small_disk(project.room / "disk", 6000):
        target = project.room / "disk" / "clone"
        shutil.copytree(project.clone(), target, symlinks=True)
        fill(project.room / "disk", leave)
        done = project.apply(dest=target, code=3)
        assert "space" in done.err, done
        assert snapshot(target) == expected(upstream_files(), link=True)
        (project.room / "disk" / "filler").unlink()
        project.apply(dest=target)
        assert snapshot(target) == expected(patched_files(), link=True)


def test_a_full_disk_for_temporary_files(project):
    with small_disk(project.temp, 100):
        fill(project.temp, 0)
        done = project.apply(code=None)  # Python may find another temporary folder
        assert done.code == 0 or (done.code == 3 and "space" in done.err and not project.tree.exists()), done


def test_a_destination_that_is_a_mount_point(project):
    """It cannot be renamed over: refused, nothing half-done."""
    with small_disk(project.tree, 4000):
        done = project.apply(code=3)
        assert "next:" in done.err and list(project.tree.iterdir()) == []
        project.apply(dest=project.tree / "below")
