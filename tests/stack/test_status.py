# SPDX-License-Identifier: Apache-2.0
"""`status`: every state, on git trees and plain directories, and the command that each one advises."""
import os
import pathlib
import shlex
import shutil
import time

import pytest

from . import project as fake
from .project import OLD, OVERLAY_PATH, TAG, commit, git, message, snapshot, write_files


def status(project, tree: pathlib.Path | None = None) -> dict:
    done = project.run("status", tree or project.tree, "--json", code=None)
    assert done.code == (0 if done.json["state"] in ("applied", "unapplied") else 1)
    return done.json


def plain(project, tree: pathlib.Path) -> pathlib.Path:
    """The files of a tree without its .git."""
    target = project.room / "plain"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(tree, target, ignore=shutil.ignore_patterns(".git"), symlinks=True)
    return target


def follow(project, advice: str, new: str = "new") -> fake.Result:
    """Run the first command of this tool that an advice names, from the project's folder as a reader would."""
    line = advice[advice.index("python apply.py") :].split("; ")[0].replace("NEW_DIRECTORY", str(project.room / new))
    return project.run(*shlex.split(line)[2:], cwd=project.root, code=None)


def test_unapplied(project):
    clone = project.clone()
    found = status(project, clone)
    assert (found["state"], found["base"], found["level"]) == ("unapplied", TAG, "touched")
    assert follow(project, found["next"]).code == 0
    assert status(project, clone)["state"] == "applied"


def test_applied(applied):
    found = status(applied)
    assert (found["state"], found["base"], found["level"]) == ("applied", TAG, "exact")
    assert follow(applied, found["next"]).code == 0


def test_applied_with_commits_elsewhere_is_modified(applied):
    """A commit on a file that no patch touches is still one that patches/ does not have."""
    commit(applied.tree, {"README.md": b"mine\n"}, message("delta", "[Doc] Delta"))
    found = status(applied)
    assert found["state"] == "modified" and "export" in found["next"]
    assert follow(applied, found["next"]).code == 0
    assert status(applied)["state"] == "applied"


def test_modified_by_a_commit(applied):
    commit(applied.tree, {"vllm/envs.py": (applied.tree / "vllm/envs.py").read_bytes() + b"# more\n"}, message("delta", "[Core] Delta"))
    found = status(applied)
    assert (found["state"], found["base"]) == ("modified", TAG)
    assert follow(applied, found["next"]).code == 0
    assert status(applied)["state"] == "applied"


@pytest.mark.parametrize("path", ["README.md", "vllm/envs.py", "docs/\u00fcn\u00efcode.md", OVERLAY_PATH])
def test_modified_by_an_edit(applied, path):
    write_files(applied.tree, {path: b"edited = 1\n"})
    found = status(applied)
    assert found["state"] == "modified" and path in found["detail"] and "export" in found["next"]


def test_a_name_that_is_not_utf_8(project):
    """Shown somehow; never a traceback."""
    clone = project.clone()
    path = os.fsencode(clone) + b"/b\xff.txt"
    with open(path, "wb") as f:
        f.write(b"1\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "x")
    with open(path, "wb") as f:
        f.write(b"2\n")
    assert project.run("status", clone, code=1).out.startswith("modified")
    project.apply(dest=clone, code=3)


@pytest.mark.parametrize("count", [1, 2])
def test_partial(applied, count):
    git(applied.tree, "reset", "--quiet", "--hard", f"HEAD~{count}")
    found = status(applied)
    assert found["state"] == "partial" and f"{3 - count} of 3" in found["detail"] and TAG in found["next"]
    git(applied.tree, "checkout", "--quiet", "upstream")  # "check out upstream, then"
    assert follow(applied, found["next"]).code == 0
    assert status(applied)["state"] == "applied"


def test_partial_directory(applied):
    tree = plain(applied, applied.tree)
    write_files(tree, {"vllm/envs.py": fake.FILES["vllm/envs.py"]})
    found = status(applied, tree)
    assert (found["state"], found["level"]) == ("partial", "touched") and "vllm/envs.py" in found["detail"]


def test_wrong_base(project):
    clone = project.clone()
    commit(clone, {"vllm/envs.py": b"other\n"}, "other\n")
    found = status(project, clone)
    assert (found["state"], found["base"]) == ("wrong base", None) and "vllm/envs.py" in found["detail"]
    assert follow(project, found["next"]).code == 0
    assert status(project, project.room / "new")["state"] == "applied"


def test_the_old_base(project):
    clone = project.clone(at=OLD)
    assert (status(project, clone)["state"], status(project, clone)["base"]) == ("unapplied", OLD)
    project.apply("--ref", OLD)
    assert (status(project)["state"], status(project)["base"]) == ("applied", OLD)


def test_plain_directories(applied):
    tree = plain(applied, applied.tree)
    found = status(applied, tree)
    assert (found["state"], found["level"]) == ("applied", "touched")
    assert follow(applied, found["next"]).code == 0
    applied.run("unapply", applied.tree)
    found = status(applied, plain(applied, applied.tree))
    assert (found["state"], found["level"]) == ("unapplied", "touched")
    assert follow(applied, found["next"]).code == 0
    assert status(applied, applied.room / "new")["state"] == "applied"
    applied.run("unapply", tree, code=0)  # the directory is upstream's by now


def test_an_installed_package_has_no_tests(applied):
    """A wheel carries vllm/ alone: what a patch changes in tests/ cannot be looked for there."""
    commit(applied.tree, {"tests/test_delta.py": b"# SPDX-License-Identifier: Apache-2.0\n"}, message("delta", "[Test] Delta"))
    applied.run("export", applied.tree)
    site = applied.room / "site-packages"
    shutil.copytree(applied.tree / "vllm", site / "vllm", symlinks=True)
    (site / "vllm-1.2.3.dist-info").mkdir()
    (site / "vllm-1.2.3.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1.2.3\n")
    found = status(applied, site)
    assert (found["state"], found["level"]) == ("applied", "touched")
    assert applied.run("verify", site).code == 0
    shutil.rmtree(site / "vllm-1.2.3.dist-info")  # then it is a directory like any other
    assert status(applied, site)["state"] != "applied"


def test_a_directory_of_something_else(project):
    (project.room / "other").mkdir()
    assert status(project, project.room / "other")["state"] == "wrong base"
    assert project.run("status", project.room / "missing", code=2).err.count("next:") == 1


def test_a_directory_inside_another_repository_is_judged_alone(applied):
    inner = applied.tree / "inner"
    (inner / ".git").mkdir(parents=True)  # no repository, only looks like one
    assert status(applied, inner)["state"] == "wrong base"
    shutil.rmtree(inner / ".git")
    assert status(applied, inner)["state"] == "wrong base"


def test_status_writes_nothing(applied):
    before = {p: p.lstat().st_mtime_ns for p in applied.tree.rglob("*")}
    time.sleep(0.02)
    status(applied)
    assert {p: p.lstat().st_mtime_ns for p in applied.tree.rglob("*")} == before


@pytest.mark.parametrize("damage", [b"", b"garbage", b"0123456789", None])
@pytest.mark.parametrize("name", ["base", "applied"])
def test_a_damaged_record_counts_as_absent(applied, name, damage):
    file = applied.tree / ".git/refs/patchstack" / name
    assert file.exists()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    assert status(applied)["state"] == "applied"
    assert applied.apply().out.startswith("already applied")
    before = snapshot(applied.tree)
    done = applied.run("unapply", applied.tree, code=3)
    assert "no record" in done.err and snapshot(applied.tree) == before
    git(applied.tree, "reset", "--quiet", "--hard", "HEAD~1")
    assert status(applied)["state"] == "partial"
    git(applied.tree, "reset", "--quiet", "--hard", "HEAD~3")
    assert status(applied)["state"] == "unapplied"


def test_a_base_without_a_lock_does_not_matter(applied):
    """A new base is being made: its folder has no lock yet."""
    (applied.folder(OLD) / "lock.json").unlink()
    assert status(applied)["state"] == "applied"
    applied.run("unapply", applied.tree)
    applied.apply()


def test_after_unapply_and_a_detour(applied):
    git(applied.tree, "checkout", "--quiet", "upstream")
    assert status(applied)["state"] == "unapplied"
    git(applied.tree, "checkout", "--quiet", "dcp-stack")
    assert status(applied)["state"] == "applied"
