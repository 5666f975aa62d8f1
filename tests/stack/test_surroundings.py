# SPDX-License-Identifier: Apache-2.0
"""What the tool finds around itself: paths with colons, shared and read-only caches, pip's and Python's environment, a reader that leaves."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import venv

import pytest

from . import project as fake
from . import wheels
from .project import OLD, TAG, expected, git, patched_files, snapshot, upstream_files
from .test_file_by_file import in_namespace


def without_version(files: dict[str, bytes]) -> dict[str, bytes]:
    return {k: v for k, v in files.items() if k != "vllm/_version.py"}


# ---- destinations


@pytest.mark.parametrize("there", ["empty", "absent", "absent, two links"])
def test_a_link_to_an_empty_or_absent_directory_is_that_directory(project, there):
    """It failed after all the work was done."""
    real, link = project.room / "work" / "real", project.room / "link"
    link.symlink_to(real)
    if there == "empty":
        real.mkdir()
    elif there == "absent, two links":
        (project.room / "second").symlink_to(link)
        link = project.room / "second"
    done = project.apply("--json", dest=link)
    assert link.is_symlink() and done.json["dest"] == str(real)
    assert without_version(snapshot(real)) == expected(patched_files())
    project.run("unapply", link)
    assert project.run("status", link, "--json").json["state"] == "unapplied" and link.is_symlink()


def test_a_destination_that_appears_meanwhile(project):
    """Two runs start with nothing there; the slower one finds the tree of the faster."""
    command = [sys.executable, str(project.root / "apply.py"), "apply", "--json", "--dest", str(project.tree)]
    runs = [subprocess.Popen(command, env=project.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    states = []
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        states.append(json.loads(out)["state"])
    assert states.count("applied") == 1 and states.count("already applied") == 2
    assert project.leftovers() == []


@pytest.mark.parametrize("name", ["a:b", 'q"uote', "back\\slash", "line\nend", "#hash", " blank "])
def test_unusual_characters_in_every_path(template, tmp_path, name):
    """Colons separate lists of paths, for git and for Python."""
    project = fake.copy_of(template, tmp_path / name)
    shutil.rmtree(project.cache)
    project.apply("--verify", "--source", project.sdist())
    if name == "a:b":
        project.apply("--source", "pypi", dest=project.room / "pip", env={"VLLM_STACK_CACHE": str(project.room / "cache:2")})
    clone = project.clone()
    project.apply("--source", clone, dest=project.room / "from")
    project.apply(dest=clone)
    assert "nothing to export" in project.run("export", clone).out
    project.run("unapply", clone)
    assert snapshot(clone) == expected(upstream_files(), link=True)
    project.run("lint")
    assert list(project.temp.iterdir()) == []


# ---- the cache


def test_a_read_only_cache_serves(project):
    """An image brings the cache; nothing has to be written to apply from it."""
    done = in_namespace(project, 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; apply apply --dest "$2"; apply verify "$2"; apply lint; rm -r "$2/.git"; apply verify "$2"', project.cache, project.tree)
    assert done.returncode == 0, done
    assert without_version(snapshot(project.tree)) == expected(patched_files())


@pytest.mark.parametrize("what", ["empty", "damaged"])
def test_a_read_only_cache_that_does_not_have_it_says_what_to_do(project, what):
    if what == "empty":
        shutil.rmtree(project.cache)
        project.cache.mkdir()
    else:
        for pack in (project.cache / "bases").glob("*/objects/pack/*.pack"):
            pack.chmod(0o644)
            pack.write_bytes(pack.read_bytes()[:-1])
    before = snapshot(project.cache)
    done = in_namespace(project, 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; apply apply --dest "$2" || echo "code $?"', project.cache, project.tree)
    assert "code 3" in done.stdout and "Read-only" in done.stderr and "VLLM_STACK_CACHE" in done.stderr, done
    assert snapshot(project.cache) == before and not project.tree.exists()


def test_a_cache_that_several_users_share(project):
    """What one puts in, the others may read; what one's killed run left, another does not remove."""
    shutil.rmtree(project.cache)
    project.apply(prefix=("sh", "-c", 'umask 022; exec "$@"', "sh"))
    for path in project.cache.rglob("*"):
        assert path.stat().st_mode & 0o004 and (not path.is_dir() or path.stat().st_mode & 0o001), path
    if os.geteuid() == 0:
        stale = project.cache / "bases" / ".import-other"
        stale.mkdir()
        os.chown(stale, 1234, 1234)
        shutil.rmtree(project.cache / "bases" / next(p.name for p in (project.cache / "bases").glob(f"{TAG}-sdist-*")))
        project.apply(dest=project.room / "second")
        assert stale.exists()


def test_a_plain_directory_leaves_nothing_in_the_cache(project):
    import tarfile

    with tarfile.open(project.sdist()) as archive:
        archive.extractall(project.room / "unpacked", filter="data")
    before = snapshot(project.cache)
    project.apply("--source", project.room / "unpacked" / f"vllm-{TAG[1:]}")
    assert snapshot(project.cache) == before and list(project.temp.iterdir()) == []


# ---- scratch folders


HOLD = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from patchstack import workspace
with workspace.scratch(pathlib.Path(sys.argv[2]), "x-") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""
CLEAR = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from patchstack import workspace
workspace.clear(pathlib.Path(sys.argv[2]), "x-")
"""


def test_a_scratch_folder_lives_as_long_as_its_run(project):
    """By a lock, not by a process id: ids mean nothing in another container."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(project.root / "scripts"), str(project.temp)], stdout=subprocess.PIPE, text=True)
    folder = pathlib.Path(holder.stdout.readline().strip())
    clear = [sys.executable, "-c", CLEAR, str(project.root / "scripts"), str(project.temp)]
    for prefix in ([], ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]):
        if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
            continue
        subprocess.run([*prefix, *clear], check=True)
        assert folder.is_dir()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    (project.temp / "x-file").write_text("no folder")
    (project.temp / "other-x-").mkdir()
    subprocess.run(clear, check=True)
    assert sorted(p.name for p in project.temp.iterdir()) == ["other-x-", "x-file"]


def test_killed_runs_leave_nothing_in_tmpdir_for_long(project):
    """40 to 50 folders were left there once."""
    for number in range(5):
        run = subprocess.Popen([sys.executable, str(project.root / "apply.py"), "apply", "--dest", str(project.tree)], env=project.environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(0.15 + number * 0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert len(list(project.temp.iterdir())) <= 1
    project.apply()
    assert list(project.temp.iterdir()) == []


def test_the_clock_does_not_matter(project):
    """Files from the future and from 1970, in the tree, the cache and the scratch places."""
    clone = project.clone()
    (project.temp / "patchstack-old").mkdir()
    for stamp in (0, 2**33):
        for folder in (clone, project.cache, project.temp):
            for path in folder.rglob("*"):
                os.utime(path, (stamp, stamp), follow_symlinks=False)
        assert project.run("status", clone, "--json").json["state"] == "unapplied"
        project.apply(dest=clone)
        project.run("unapply", clone)
        assert snapshot(clone) == expected(upstream_files(), link=True) and list(project.temp.iterdir()) == []


# ---- Python and pip


@pytest.mark.parametrize("level", ["1", "2"])
def test_optimised_python(project, level):
    """-OO has no docstrings: help must not come from them."""
    env = {"PYTHONOPTIMIZE": level}
    project.apply(env=env)
    project.run("status", project.tree, env=env)
    project.run("verify", "--each", project.tree, env=env)
    project.run("export", project.tree, env=env)
    project.run("lint", env=env)
    project.run("unapply", project.tree, env=env)
    shown = project.run("--help", env=env).out
    for command in ("apply", "verify", "status", "unapply", "export", "lint", "bases", "drift", "rebase", "carve", "wheel", "bundle"):
        help_text = project.run(command, "--help", env=env).out
        assert len(help_text.splitlines()) > 8 and command in shown
        assert help_text == project.run(command, "--help").out


@pytest.mark.parametrize("setting", ["PIP_REQUIRE_VIRTUALENV", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "configuration file"])
def test_pip_settings_that_are_meant_for_installations(project, setting):
    shutil.rmtree(project.cache)
    (project.room / "constraints").write_text("vllm==0.0.1\nsetuptools==1.0\n")
    (project.room / "requirements").write_text("nothing-such==1.0\n")
    (project.room / "pip.conf").write_text(f"[global]\nrequire-virtualenv = true\nconstraint = {project.room}/constraints\n")
    env = {"PIP_REQUIRE_VIRTUALENV": {"PIP_REQUIRE_VIRTUALENV": "1"}, "PIP_CONSTRAINT": {"PIP_CONSTRAINT": str(project.room / "constraints")},
           "PIP_REQUIREMENT": {"PIP_REQUIREMENT": str(project.room / "requirements")}, "configuration file": {"PIP_CONFIG_FILE": str(project.room / "pip.conf")}}[setting]  # fmt: skip
    python = sys._base_executable  # outside every virtual environment
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip(f"{python} has no pip")
    done = subprocess.run([python, str(project.root / "apply.py"), "apply", "--source", "pypi", "--dest", str(project.tree)], env=project.environment(**env), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([python, str(project.root / "apply.py"), "apply", "--dest", str(project.tree)], env=project.environment(**env), capture_output=True).returncode == 0


def test_a_python_without_pip(project):
    """Named, with what to do; `auto` goes on to git."""
    venv.create(project.room / "bare", with_pip=False)
    python = str(project.room / "bare/bin/python")
    shutil.rmtree(project.cache)

    def run(*args: object) -> subprocess.CompletedProcess:
        return subprocess.run([python, str(project.root / "apply.py"), *map(str, args)], env=project.environment(), capture_output=True, text=True)

    done = run("apply", "--source", "pypi", "--dest", project.tree)
    assert done.returncode == 5 and "this Python has no pip" in done.stderr and "ensurepip" in done.stderr
    done = run("apply", "--dest", project.tree, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == "git"
    shutil.rmtree(project.upstream)
    shutil.rmtree(project.cache)
    done = run("apply", "--dest", project.room / "x")
    assert done.returncode == 5 and "has no pip" in done.stderr and "could not fetch" in done.stderr


def test_a_patched_wheel_that_pip_installed(project):
    """pip sets permissions as it likes: content counts, and the provenance in the dist-info says whose it is."""
    wheels.add_official(project)
    done = project.run("wheel", "--platform", "x86_64", "--out", project.room / "out", "--json").json
    venv.create(project.room / "venv", with_pip=False)
    python = project.room / "venv/bin/python"

    def install(path: str) -> None:
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-compile", "--force-reinstall", path], env=project.environment(), check=True, capture_output=True)

    install(done["wheel"])
    site = next((project.room / "venv/lib").glob("python*/site-packages"))
    for path in (site / "vllm").rglob("*.py"):
        path.chmod(0o755)
    found = project.run("status", site, "--json").json
    assert (found["state"], found["base"]) == ("applied", TAG) and "patched wheel" in found["detail"]
    assert project.run("verify", site, "--json").json["findings"] == []
    lock = json.loads((project.folder() / "lock.json").read_text())
    edited = next(path for path, (_, after) in lock["touched"].items() if after and path.startswith("vllm/"))
    kept = (site / edited).read_bytes()
    (site / edited).write_bytes(kept + b"# mine\n")
    found = project.run("status", site, "--json", code=1).json
    assert found["state"] == "modified" and edited in found["detail"]
    assert edited in project.run("verify", site, code=1).out
    (site / edited).write_bytes(kept)
    project.apply()
    fake.commit(project.tree, {"vllm/gamma.py": (project.tree / "vllm/gamma.py").read_bytes() + b"\nMORE = 1\n"}, fake.message("delta", "[Core] Delta"))
    project.run("export", project.tree)
    assert "another version of the stack" in project.run("status", site, code=1).out
    install(str(project.index / f"vllm-{TAG[1:]}-cp38-abi3-{wheels.PLATFORM}.whl"))
    found = project.run("status", site, "--json").json
    assert found["state"] == "unapplied" and "wheel" in found["next"]


# ---- how the project itself was cloned


@pytest.mark.parametrize("attributes", [True, False])
def test_a_project_cloned_with_autocrlf(project, attributes):
    """With the .gitattributes it does not matter; a copy without them says it in one message."""
    if attributes:
        shutil.copy(fake.REPOSITORY / ".gitattributes", project.root)
    git(project.root, "init", "--quiet", "--template=", ".")
    git(project.root, "add", "-A", "-f")
    git(project.root, "commit", "-qm", "x")
    git(project.room, "clone", "--quiet", "-c", "core.autocrlf=true", "project", "windows")
    project.root = project.room / "windows"
    (project.root / "tests/stack").mkdir(parents=True, exist_ok=True)
    if attributes:
        project.apply()
        project.run("lint")
        return
    for command in (("apply", "--dest", project.tree), ("lint",)):
        done = project.run(*command, code=None)
        assert done.code == (1 if command[0] == "lint" else 3)
        assert (done.out + done.err).count("DOS line ends") == 1 and len((done.out + done.err).splitlines()) <= 3, done
    advice = project.apply(code=3).err.split("next: in this project: ")[1].strip()
    subprocess.run(["sh", "-c", advice], cwd=project.root, check=True, capture_output=True)
    project.apply()


# ---- what is said


def test_a_reader_that_leaves(project):
    """`| head -1`: the command does its work all the same, and says nothing of pipes."""
    project.apply()
    for unbuffered in ("", "1"):
        for args in (["bases"], ["status", str(project.tree)], ["bases", "--json"], ["unapply", str(project.tree)], ["apply", "--dest", str(project.tree)]):
            reader, writer = os.pipe()
            os.close(reader)
            done = subprocess.run([sys.executable, str(project.root / "apply.py"), *args], env=project.environment(PYTHONUNBUFFERED=unbuffered), stdout=writer, stderr=subprocess.PIPE, text=True)
            os.close(writer)
            assert done.returncode == 0 and "Broken" not in done.stderr and "rror" not in done.stderr, (args, done)
    assert project.run("status", project.tree, "--json").json["state"] == "applied"
    shown = subprocess.run(["sh", "-c", f'"{sys.executable}" "{project.root}/apply.py" bases | head -1'], env=project.environment(), capture_output=True, text=True)
    assert shown.stdout.count("\n") == 1 and shown.stderr == ""


def test_git_s_own_reason_comes_first(project):
    """Whatever git says after it: hints, or where to look."""
    (project.room / "bin").mkdir()
    real = shutil.which("git")
    shim = f"""#!/bin/sh
for a in "$@"; do [ "$a" = fetch ] && {{ echo "warning: before" >&2; echo "fatal: the very reason" >&2; for i in 1 2 3 4 5; do echo "hint: $i" >&2; done; exit 128; }}; done
exec {real} "$@"
"""
    (project.room / "bin/git").write_text(shim)
    (project.room / "bin/git").chmod(0o755)
    done = project.apply("--source", "https://nowhere.invalid/x", code=5, env={"PATH": f"{project.room / 'bin'}{os.pathsep}{os.environ['PATH']}"})
    lines = done.err.splitlines()
    at = next(i for i, line in enumerate(lines) if "git could not fetch" in line)
    assert "fatal: the very reason" in lines[at + 1]


@pytest.mark.parametrize("ref", ["main", "abcdef0123", "v9.9.9"])
def test_the_advice_on_a_ref_that_is_no_pin_works(project, ref):
    """A branch is neither a pin nor a release: `drift --ref main` would be refused too."""
    import shlex

    done = project.apply("--ref", ref, code=2)
    assert TAG in done.err and OLD in done.err
    advice = done.err.split("next: ")[1]
    if ref == "v9.9.9":
        assert f"drift --ref {ref}" in advice
        return
    first, second = advice.split("; ")
    assert project.run(*shlex.split(first.split("python apply.py ")[1]), "--dest", project.tree).code == 0
    line = second[second.index("python apply.py") :].split("   ")[0].replace("CLONE", str(project.clone()))
    assert "clean" in project.run(*shlex.split(line)[2:]).out


@pytest.mark.parametrize("leave", [0, 20000, 60000])
def test_a_full_disk_in_place_is_said_in_words(project, leave):
    done = in_namespace(project, """
        mkdir "$1"; mount -t tmpfs -o size=6000k none "$1"; cp -a "$2" "$1/clone"
        free=$(( $(stat -f -c '%a * %S' "$1") - $3 )); dd if=/dev/zero of="$1/filler" bs="$free" count=1 2>/dev/null
        apply apply --dest "$1/clone" || echo "code $?"
        rm "$1/filler"; apply status "$1/clone"; apply apply --dest "$1/clone"
        """, project.room / "disk", project.clone(), leave)  # fmt: skip
    assert done.returncode == 0, done
    if "code 3" in done.stdout:
        assert "No space left" in done.stderr and "[(" not in done.stderr and "Errno" not in done.stderr and "next:" in done.stderr, done
        assert "unapplied" in done.stdout
    assert "code" not in done.stdout or "code 3" in done.stdout
