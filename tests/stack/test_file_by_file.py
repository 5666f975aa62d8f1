# SPDX-License-Identifier: Apache-2.0
"""`apply` and `unapply` in somebody's tree touch the stack's own files and no others, whatever is in it and whatever happens meanwhile."""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading
import time

import pytest

from . import kills
from . import project as fake
from .project import OVERLAY, OVERLAY_PATH, expected, git, patched_files, snapshot, upstream_files, write_files

STACK = {path for _, _, edits in fake.EDITS.values() for path in edits} | OVERLAY.keys()
UPSTREAM, PATCHED = expected(upstream_files(), link=True), expected(patched_files(), link=True)


def in_namespace(project, script: str, *args: object) -> subprocess.CompletedProcess:
    """Run a shell script with mounts of its own; skip where that is not possible."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no user and mount namespaces here (unshare --user --mount)")
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", f'apply() {{ "{sys.executable}" "{project.root}/apply.py" "$@"; }}\n{script}', "sh", *map(str, args)]
    done = subprocess.run(command, env=project.environment(), capture_output=True, text=True, timeout=120)
    if "mount:" in done.stderr and done.returncode == 32:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    return done


def both_ways(project, tree: pathlib.Path) -> None:
    project.apply(dest=tree)
    project.run("unapply", tree)


# ---- what is in the tree, and is not the stack's


def test_a_volume_mounted_in_the_tree_stays_as_it_is(project):
    """It was emptied once, when the whole directory was swapped."""
    clone, volume = project.clone(), project.room / "volume"
    write_files(volume, {"weights.bin": b"precious\n", "deep/er/x": b"1\n"})
    (clone / "data").mkdir()
    done = in_namespace(project, 'mount --bind "$1" "$2/data"; apply apply --dest "$2"; ls "$2/data"; apply unapply "$2"; test -e "$2/data/weights.bin"', volume, clone)
    assert done.returncode == 0 and "weights.bin" in done.stdout, done
    assert snapshot(volume) == {"weights.bin": b"precious\n", "deep/er/x": b"1\n"}
    assert snapshot(clone) == UPSTREAM


@pytest.mark.parametrize("path", ["vllm/envs.py", "vllm/old.py"])
def test_a_mount_over_a_file_of_the_stack_is_named_and_everything_taken_back(project, path):
    clone, before = project.clone(), (project.room / "file")
    shutil.copy(clone / path, before)
    done = in_namespace(project, 'mount --bind "$1" "$2"; apply apply --dest "$3" || echo "code $?"; apply status "$3"', before, clone / path, clone)
    assert done.returncode == 0 and "code 3" in done.stdout and "unapplied" in done.stdout, done
    assert f"{path} is a mount point" in done.stderr and "taken back" in done.stderr, done
    assert snapshot(clone) == UPSTREAM and git(clone, "status", "--porcelain") == "" and git(clone, "symbolic-ref", "--short", "HEAD") == "mine"
    assert project.leftovers() == [] and not (clone / ".git/patchstack").exists()
    assert before.read_bytes() == fake.FILES[path]


def test_a_folder_of_the_stack_that_is_mounted_read_only(project):
    clone = project.clone()
    done = in_namespace(project, 'mount --bind "$1/docs" "$1/docs"; mount -o remount,bind,ro "$1/docs"; apply apply --dest "$1" || echo "code $?"; apply status "$1"', clone)
    assert done.returncode == 0 and "code 3" in done.stdout and "unapplied" in done.stdout and "docs/a file.md" in done.stderr and "Read-only" in done.stderr, done
    assert snapshot(clone) == UPSTREAM and git(clone, "status", "--porcelain") == ""


def test_on_overlayfs(project):
    """A clone in one layer of an image, apply in the next: a whole directory cannot be renamed there."""
    clone = project.clone()
    for name in ("upper", "work2", "merged"):
        (project.room / name).mkdir()
    script = 'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work2" "$2/merged"; apply apply --dest "$2/merged"; apply verify "$2/merged"; cp -a "$2/merged" "$2/patched"; apply unapply "$2/merged"; cp -a "$2/merged" "$2/back"'
    done = in_namespace(project, script, clone, project.room)
    assert done.returncode == 0, done
    assert snapshot(project.room / "patched") == PATCHED and snapshot(project.room / "back") == UPSTREAM == snapshot(clone)


def test_files_that_others_write_meanwhile_are_all_there(project):
    """A build or a server that writes into the tree: 101 of 418 files were lost once."""
    clone, written, stop = project.clone(), [], threading.Event()

    def build() -> None:
        number = 0
        while not stop.is_set():
            path = clone / ("vllm/v1" if number % 2 else "build") / f"made-{number}.o"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(b"%d" % number)
            written.append(path)
            number += 1
            time.sleep(0.001)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        for _ in range(2):
            both_ways(project, clone)
    finally:
        stop.set()
        builder.join()
    assert len(written) > 200
    assert [p for p in written if not p.exists()] == []


def test_no_other_file_is_touched(project):
    """Same inode, same times, same bytes: also of untracked, ignored, linked and unusual ones, and of what is in .git."""
    clone = project.clone()
    write_files(clone, {"notes.txt": b"u\n", "ignored/x.o": b"i\n", "vllm/own.py": b"1\n", "vllm/v1/empty/.keep": b""})
    (clone / "vllm/own-link").symlink_to("envs.py")
    (clone / "hole").symlink_to("/nowhere")
    os.mkfifo(clone / "pipe")
    os.link(clone / "README.md", project.room / "also-readme")
    kept = {p for p in clone.rglob("*") if ".git" not in p.relative_to(clone).parts and str(p.relative_to(clone)) not in STACK and not p.is_dir()}
    before = {p: (p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns, p.lstat().st_nlink) for p in kept}
    for command in (("apply", "--dest", clone), ("unapply", clone)):
        project.run(*command)
        assert {p: (p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_ctime_ns, p.lstat().st_nlink) for p in kept} == before


def test_a_file_with_another_name_keeps_its_content(project):
    """A hard link, in somebody's backup for example, to a file that the stack replaces."""
    clone = project.clone()
    os.link(clone / "vllm/envs.py", project.room / "backup.py")
    both_ways(project, clone)
    assert (project.room / "backup.py").read_bytes() == fake.FILES["vllm/envs.py"]


def test_a_link_in_place_of_a_folder_is_not_followed(project):
    """vllm/v1 of the overlay leads out of the tree: nothing is written there."""
    clone, outside = project.clone(), project.room / "outside"
    outside.mkdir()
    (clone / "vllm/v1").symlink_to(outside)
    done = project.apply(dest=clone, code=3)
    assert "vllm/v1" in done.err and list(outside.iterdir()) == []
    assert git(clone, "status", "--porcelain") == "?? vllm/v1"


# ---- owner, permissions, time


def root_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: files of another user")


def owners(tree: pathlib.Path) -> set[tuple[int, int]]:
    return {(p.lstat().st_uid, p.lstat().st_gid) for p in [tree, *tree.rglob("*")]}


@pytest.mark.parametrize("how", ["whole", "killed"])
def test_under_sudo_everything_stays_the_user_s(project, how):
    root_only()
    clone = project.clone()
    subprocess.run(["chown", "-R", "1234:2345", str(clone)], check=True)
    names = kills.steps(project, "apply", "--dest", clone) if how == "killed" else []
    assert owners(clone) == {(1234, 2345)}
    project.run("unapply", clone)
    assert owners(clone) == {(1234, 2345)}
    for number in [n for n, name in enumerate(names, 1) if name.startswith(("rename", "program git", "link"))][::3]:
        kills.killed(project, number, "before", "apply", "--dest", clone)
        project.apply(dest=clone)
        assert owners(clone) == {(1234, 2345)}, names[number - 1]
        project.run("unapply", clone)
        assert owners(clone) == {(1234, 2345)}, names[number - 1]
    project.apply(dest=clone)
    assert owners(clone) == {(1234, 2345)}
    assert git(clone, "-c", "safe.directory=*", "status", "--porcelain") == ""


def test_each_file_keeps_its_own_owner_and_new_ones_get_that_of_their_folder(project):
    root_only()
    clone = project.clone()
    os.chown(clone / "vllm/envs.py", 11, 12)
    os.chown(clone / "vllm", 21, 22)
    project.apply(dest=clone)
    found = {path: ((clone / path).stat().st_uid, (clone / path).stat().st_gid) for path in ("vllm/envs.py", "vllm/gamma.py", "vllm/v1", OVERLAY_PATH, "vllm/crlf.py")}
    assert found == {"vllm/envs.py": (11, 12), "vllm/gamma.py": (21, 22), "vllm/v1": (21, 22), OVERLAY_PATH: (21, 22), "vllm/crlf.py": (0, 0)}


def test_somebody_else_s_file_is_refused_without_root(project):
    """Not replaced by one of ours: named, and nothing changed."""
    root_only()
    clone = project.clone()
    os.chown(clone / "vllm/envs.py", 11, 12)
    done = in_namespace(project, 'apply apply --dest "$1" || echo "code $?"', clone)
    assert "code 3" in done.stdout and "vllm/envs.py belongs to user" in done.stderr, done
    assert snapshot(clone) == UPSTREAM and (clone / "vllm/envs.py").stat().st_uid == 11
    assert project.run("status", clone, "--json").json["state"] == "unapplied"


@pytest.mark.parametrize("mask,file,folder", [("077", 0o600, 0o700), ("002", 0o664, 0o775), ("022", 0o644, 0o755)])
def test_permissions_are_kept_and_the_umask_is_respected(project, mask, file, folder):
    clone = project.clone()
    modes = {"vllm/envs.py": 0o640, "vllm/crlf.py": 0o666, "vllm/no_newline.py": 0o604, "docs/a file.md": 0o600}
    for path, mode in modes.items():
        (clone / path).chmod(mode)
    (clone / "vllm").chmod(0o2775)
    shell = ("sh", "-c", f'umask {mask}; exec "$@"', "sh")
    project.apply(dest=clone, prefix=shell)
    assert {path: stat.S_IMODE((clone / path).stat().st_mode) for path in modes} == modes
    assert stat.S_IMODE((clone / OVERLAY_PATH).stat().st_mode) == stat.S_IMODE((clone / "vllm/gamma.py").stat().st_mode) == file
    assert stat.S_IMODE((clone / "vllm/v1").stat().st_mode) & 0o777 == folder and stat.S_IMODE((clone / "vllm").stat().st_mode) == 0o2775
    project.run("unapply", clone, prefix=shell)
    assert {path: stat.S_IMODE((clone / path).stat().st_mode) for path in modes} == modes
    assert stat.S_IMODE((clone / "vllm/old.py").stat().st_mode) == file and not (clone / "vllm/v1").exists()


def test_a_script_stays_executable_by_those_who_may_read_it(project):
    """A patch that makes a file executable, and the way back."""
    project.apply(dest=project.room / "edit")
    (project.room / "edit/README.md").chmod(0o755)
    git(project.room / "edit", "commit", "-qam", fake.message("delta", "[Doc] Delta"))
    project.run("export", project.room / "edit")
    clone = project.clone()
    (clone / "README.md").chmod(0o640)
    project.apply(dest=clone)
    assert stat.S_IMODE((clone / "README.md").stat().st_mode) == 0o750
    project.run("unapply", clone)
    assert stat.S_IMODE((clone / "README.md").stat().st_mode) == 0o640


def test_an_access_list_is_kept(project):
    if shutil.which("setfacl") is None:
        pytest.skip("setfacl is not installed")
    clone = project.clone()
    if subprocess.run(["setfacl", "-m", "u:4321:rw", str(clone / "vllm/envs.py")], capture_output=True).returncode:
        pytest.skip("no access lists on this file system")
    before = os.getxattr(clone / "vllm/envs.py", "system.posix_acl_access")
    both_ways(project, clone)
    assert os.getxattr(clone / "vllm/envs.py", "system.posix_acl_access") == before


def test_compiled_python_of_the_other_version_is_never_used(project):
    """Same size, same second: Python would take the compiled file of before for that of now."""
    text = fake.FILES["vllm/no_newline.py"]
    clone = project.clone()
    future = int(time.time()) + 5
    os.utime(clone / "vllm/no_newline.py", (future, future))
    clock = f"import time; wait = {future} - time.time(); time.sleep(max(0, wait))"
    subprocess.run([sys.executable, "-c", clock], check=True)
    project.apply(dest=clone)
    assert (clone / "vllm/no_newline.py").stat().st_size == len(text) and (clone / "vllm/no_newline.py").read_bytes() != text
    assert int((clone / "vllm/no_newline.py").stat().st_mtime) != future


# ---- somebody else writes to a file of the stack


def at_step(names: list[str], what: str, count: int = 1) -> int:
    """The number of the `count`th step of that name."""
    return [n for n, name in enumerate(names, 1) if name == what][count - 1]


@pytest.mark.parametrize("when", ["the first rename", "a later rename", "the journal"])
def test_an_edit_of_a_file_right_before_its_rename(project, when):
    """It is noticed, named and kept; what was done to the others is taken back."""
    clone = project.clone()
    shutil.copytree(clone, project.room / "copy", symlinks=True)
    names = kills.steps(project, "apply", "--dest", project.room / "copy")
    path = "vllm/envs.py"
    in_force = at_step(names, "replace", 2)  # the journal, for the second time
    number = {"the first rename": in_force + 1, "a later rename": in_force + 3, "the journal": at_step(names, "replace") - 1}[when]
    done = kills.killed(project, number, "before", "apply", "--dest", clone, meddle=f"printf '# mine\\n' >> '{clone / path}'")
    assert done.returncode == 3 and path in done.stderr and "Traceback" not in done.stderr, done
    assert snapshot(clone) == UPSTREAM | {path: fake.FILES[path] + b"# mine\n"}
    assert git(clone, "status", "--porcelain") == f" M {path}" and git(clone, "symbolic-ref", "--short", "HEAD") == "mine"
    assert project.leftovers() == [] and not (clone / ".git/patchstack").exists()
    (clone / path).write_bytes(fake.FILES[path])
    project.apply(dest=clone)
    assert snapshot(clone) == PATCHED


def test_a_file_that_appears_where_the_stack_puts_one(project):
    clone = project.clone()
    shutil.copytree(clone, project.room / "copy", symlinks=True)
    names = kills.steps(project, "apply", "--dest", project.room / "copy")
    done = kills.killed(project, at_step(names, "replace", 2) + 1, "before", "apply", "--dest", clone, meddle=f"echo theirs > '{clone / 'vllm/gamma.py'}'")
    assert done.returncode == 3 and "vllm/gamma.py" in done.stderr, done
    assert snapshot(clone) == UPSTREAM | {"vllm/gamma.py": b"theirs\n"}
    assert git(clone, "status", "--porcelain") == "?? vllm/gamma.py"


def test_another_git_that_takes_the_index_meanwhile(project):
    """The files are changed already when git's lock turns out to be held: everything is taken back."""
    clone = project.clone()
    shutil.copytree(clone, project.room / "copy", symlinks=True)
    names = kills.steps(project, "apply", "--dest", project.room / "copy")
    done = kills.killed(project, at_step(names, "replace", 2) + 1, "before", "apply", "--dest", clone, meddle=f"touch '{clone / '.git/index.lock'}'")
    assert done.returncode == 3 and "index.lock" in done.stderr, done
    assert (clone / ".git/index.lock").exists()
    (clone / ".git/index.lock").unlink()
    assert snapshot(clone) == UPSTREAM and git(clone, "status", "--porcelain") == "" and git(clone, "for-each-ref", "refs/patchstack", "refs/heads/dcp-stack") == ""


# ---- interrupted


@pytest.fixture
def halfway(project):
    """A clone in which `apply` was killed between two renames."""
    clone = project.clone()
    shutil.copytree(clone, project.room / "copy", symlinks=True)
    names = kills.steps(project, "apply", "--dest", project.room / "copy")
    shutil.rmtree(project.room / "copy")
    begin = at_step(names, "replace", 2)
    assert names[begin : begin + 3] != []
    assert kills.killed(project, begin + 4, "before", "apply", "--dest", clone).returncode == -9
    assert snapshot(clone) not in (UPSTREAM, PATCHED)
    return project, clone


def test_status_says_interrupted_and_its_advice_works(halfway):
    project, clone = halfway
    before = snapshot(clone, skip=())
    found = project.run("status", clone, "--json", code=1).json
    assert found["state"] == "interrupted" and found["next"].startswith("python apply.py apply")
    assert "interrupted" in project.run("verify", clone, code=3).err
    assert "interrupted" in project.apply("--dry-run", dest=clone, code=3).err and "interrupted" in project.run("unapply", "--dry-run", clone, code=3).err
    assert snapshot(clone, skip=()) == before
    done = project.apply(dest=clone)
    assert "finished `apply`, which had been interrupted" in done.err
    assert snapshot(clone) == PATCHED


def test_export_finishes_too(halfway):
    project, clone = halfway
    assert "finished `apply`" in project.run("export", clone, "--base", fake.TAG).err
    assert snapshot(clone) == PATCHED


def test_new_files_that_were_cleaned_away_cannot_be_finished(halfway):
    """`git clean` took what lay beside the targets: then the old files come back."""
    project, clone = halfway
    for path in clone.rglob(".*.patchstack-*"):
        path.unlink()
    assert "took back `apply`" in project.run("unapply", clone).err
    assert snapshot(clone) == UPSTREAM and git(clone, "status", "--porcelain") == ""


def test_an_edit_after_the_interruption_is_kept(halfway):
    """A file that is patched already and edited since: which version is meant, nobody can tell. Refused by name until it is moved away."""
    project, clone = halfway
    patched = [path for path in sorted(STACK) if (clone / path).exists() and expected(patched_files(), link=True).get(path) == (clone / path).read_bytes() and path in UPSTREAM]
    (clone / patched[0]).write_bytes(b"my own = 1\n")
    before = snapshot(clone, skip=())
    done = project.apply(dest=clone, code=3)
    assert patched[0] in done.err and "move it away" in done.err
    assert snapshot(clone) == {k: v for k, v in before.items() if not k.startswith(".git/")}
    (clone / patched[0]).rename(project.room / "mine.py")
    project.apply(dest=clone)
    assert snapshot(clone) == PATCHED and (project.room / "mine.py").read_bytes() == b"my own = 1\n"


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"schema": 99}', b"[]"])
def test_a_damaged_journal_counts_as_absent_and_loses_nothing(halfway, damage):
    project, clone = halfway
    (clone / ".git/patchstack/journal.json").write_bytes(damage)
    backups = sorted(p.read_bytes() for p in (clone / ".git/patchstack/old").iterdir())
    assert project.run("status", clone, "--json", code=None).json["state"] in ("modified", "partial", "wrong base")
    done = project.apply(dest=clone, code=None)
    assert done.code == 3 and "damaged" in done.err
    (aside,) = (clone / ".git").glob("patchstack.damaged-*")
    assert sorted(p.read_bytes() for p in (aside / "old").iterdir()) == backups
    git(clone, "checkout", "--quiet", "--", ".")
    git(clone, "clean", "-qfd")
    project.apply(dest=clone)
    assert snapshot(clone) == PATCHED


def test_a_head_that_moved_after_the_interruption_is_not_moved_again(halfway):
    project, clone = halfway
    git(clone, "update-ref", "refs/heads/other", fake.git(clone, "commit-tree", "-m", "x", "HEAD^{tree}"))
    git(clone, "symbolic-ref", "HEAD", "refs/heads/other")
    done = project.apply(dest=clone, code=3)
    assert "HEAD has moved since" in done.err and "checkout mine" in done.err
    git(clone, "symbolic-ref", "HEAD", "refs/heads/mine")
    project.apply(dest=clone)
    assert snapshot(clone) == PATCHED


def test_a_tree_that_was_moved_after_the_interruption(halfway):
    project, clone = halfway
    moved = clone.rename(project.room / "work" / "moved")
    project.apply(dest=moved)
    assert snapshot(moved) == PATCHED


@pytest.mark.parametrize("lock", ["HEAD.lock", "refs/heads/dcp-stack.lock", "packed-refs.lock", "config.lock"])
def test_a_lock_that_a_killed_git_of_ours_left(halfway, lock):
    project, clone = halfway
    (clone / ".git" / lock).write_text("")
    done = project.apply(dest=clone)
    assert f"{lock} was left by the interrupted run: removed" in done.err
    assert snapshot(clone) == PATCHED and git(clone, "status", "--porcelain") == ""


def test_a_second_run_waits_for_the_first(project):
    """Two at once: one does it, the other finds it done."""
    clone = project.clone()
    command = [sys.executable, str(project.root / "apply.py"), "apply", "--json", "--dest", str(clone)]
    runs = [subprocess.Popen(command, env=project.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    states = []
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        states.append(json.loads(out)["state"])
    assert sorted(states) == ["already applied"] * 3 + ["applied"]
    assert snapshot(clone) == PATCHED and project.leftovers() == []


def test_a_branch_of_that_name_with_somebody_s_commits(project):
    clone = project.clone()
    git(clone, "branch", "dcp-stack", fake.git(clone, "commit-tree", "-p", "HEAD", "-m", "mine", "HEAD^{tree}"))
    before = git(clone, "for-each-ref")
    done = project.apply(dest=clone, code=3)
    assert "has a branch dcp-stack" in done.err and "branch -m dcp-stack" in done.err
    assert git(clone, "for-each-ref") == before and snapshot(clone) == UPSTREAM
    git(clone, "branch", "-m", "dcp-stack", "my-dcp-stack")
    project.apply(dest=clone)


def test_the_branch_in_another_worktree_is_not_moved(project):
    clone = project.clone()
    project.apply(dest=clone)
    git(clone, "checkout", "--quiet", "--detach")
    git(clone, "worktree", "add", "--quiet", str(project.room / "other"), "dcp-stack")
    for command in (("unapply", clone), ("apply", "--dest", clone)):
        git(clone, "checkout", "--quiet", "--detach", "dcp-stack" if command[0] == "unapply" else fake.TAG)
        done = project.run(*command, code=3)
        assert "checked out in another worktree" in done.err and str(project.room / "other") in done.err
    assert git(project.room / "other", "status", "--porcelain") == ""
    git(project.room / "other", "checkout", "--quiet", "--detach")
    project.apply(dest=clone)


def test_a_long_name(project):
    """The name beside the target must not be longer than the file system allows."""
    name = "vllm/" + "\u00fc" * 120 + ".py"
    project.apply(dest=project.room / "edit")
    fake.commit(project.room / "edit", {name: b"# SPDX-License-Identifier: Apache-2.0\n"}, fake.message("delta", "[Doc] Delta"))
    project.run("export", project.room / "edit")
    clone = project.clone()
    both_ways(project, clone)
    assert snapshot(clone) == UPSTREAM


def test_a_bundle_in_which_something_is_mounted_is_not_replaced(project):
    """A bundle is replaced as a whole: nothing else may be in it."""
    out, file = project.room / "out", project.room / "precious"
    write_files(out, {"run.py": b"x\n", "part-1.bin": b"x\n", "part-2.bin": b"x\n"})
    file.write_bytes(b"1\n")
    code = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from patchstack import bundle
from patchstack.errors import Refused
try:
    bundle.write(None, "layer", [], pathlib.Path(sys.argv[2]), 1, None)
except Refused as e:
    print(e.message)
"""
    (out / "data").mkdir()
    command = [sys.executable, "-c", code, str(project.root / "scripts"), str(out)]
    assert "holds other things" in subprocess.run(command, capture_output=True, text=True).stdout
    (out / "data").rmdir()
    done = in_namespace(project, f'mount --bind "$1" "$2/part-2.bin"; shift 2; "{sys.executable}" -c "$@"', file, out, *command[2:])
    assert "something is mounted in" in done.stdout, done
    assert file.read_bytes() == b"1\n" and sorted(p.name for p in out.iterdir()) == ["part-1.bin", "part-2.bin", "run.py"]
