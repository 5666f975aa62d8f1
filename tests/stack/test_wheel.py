# SPDX-License-Identifier: Apache-2.0
"""`wheel`: the patched wheel holds exactly the patched files, installs and uninstalls whole, and bad input gives none."""
import json
import subprocess
import sys
import venv
import zipfile

import pytest

from . import project as fake
from . import wheels
from .wheels import COMPILED, PLATFORM, VERSION


@pytest.fixture
def ready(project):
    """A project whose official wheel is pinned and on the index."""
    wheels.add_official(project)
    return project


def out(project):
    return project.room / "out"


def build(project, *args, **options):
    return project.run("wheel", "--platform", "x86_64", "--out", out(project), "--json", *args, **options)


def built(project):
    (path,) = out(project).iterdir()
    return path


def test_the_wheel_holds_the_patched_files(ready):
    done = build(ready).json
    assert done["version"].startswith(f"{VERSION}+dcp") and len(done["version"]) == len(VERSION) + 12
    assert done["version"].endswith(done["patchset"][:8])
    assert built(ready).name == f"vllm-{done['version']}-cp38-abi3-{PLATFORM}.whl" and str(built(ready)) == done["wheel"]
    assert done["sha256"] == wheels.sha256(built(ready)) and done["left_out"] == ["docs/a file.md"]
    with zipfile.ZipFile(built(ready)) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
        assert archive.namelist()[-1] == f"vllm-{done['version']}.dist-info/RECORD"
        modes = {m.filename: m.external_attr >> 16 for m in archive.infolist()}
    info = f"vllm-{done['version']}.dist-info/"
    code = {k: v for k, v in found.items() if not k.startswith(info) and k != "vllm/_version.py"}
    wanted = {k: v for k, v in fake.patched_files().items() if k.startswith("vllm/")} | COMPILED | {k: v for k, v in wheels.GENERATED.items() if k != "vllm/_version.py"}
    assert code == wanted
    assert modes["vllm/vllm-rs"] == 0o100755 and modes[fake.OVERLAY_PATH] == 0o100644
    metadata = found[info + "METADATA"].decode()
    assert f"\nVersion: {done['version']}\n" in metadata and metadata.endswith("\n\nVersion: of the text\nhttps://mirror.invalid/\n")
    assert found[info + "WHEEL"] == zipfile.ZipFile(ready.index / f"vllm-{VERSION}-cp38-abi3-{PLATFORM}.whl").read(f"vllm-{VERSION}.dist-info/WHEEL")


def test_kept_members_are_not_even_compressed_anew(ready):
    build(ready)
    with zipfile.ZipFile(ready.index / f"vllm-{VERSION}-cp38-abi3-{PLATFORM}.whl") as before, zipfile.ZipFile(built(ready)) as after:
        for path in COMPILED:
            a, b = before.getinfo(path), after.getinfo(path)
            assert (a.CRC, a.compress_size, a.date_time) == (b.CRC, b.compress_size, b.date_time), path
        assert after.testzip() is None


def test_the_provenance_names_what_went_in(ready):
    done = build(ready).json
    with zipfile.ZipFile(built(ready)) as archive:
        told = json.loads(archive.read(f"vllm-{done['version']}.dist-info/dcp_stack.json"))
    lock = json.loads((ready.folder() / "lock.json").read_text())
    assert told["base"]["tag"] == fake.TAG and told["result_tree"] == lock["result_tree"] and told["patchset"] == done["patchset"]
    assert [p["topic"] for p in told["patches"]] == fake.TOPICS and [p["sha256"] for p in told["patches"]] == [p["sha256"] for p in lock["patches"]]
    assert told["official_wheel"]["sha256"] == done["official"]["sha256"]
    assert told["files"] == done["files"] == {
        "vllm/_version.py": "replaced", "vllm/crlf.py": "replaced", "vllm/distributed/parallel_state.py": "replaced", "vllm/envs.py": "replaced", "vllm/no_newline.py": "replaced",
        "vllm/gamma.py": "added", fake.OVERLAY_PATH: "added", "vllm/old.py": "removed",
    }  # fmt: skip


def test_pip_installs_it_and_uninstalls_every_file(ready):
    version = build(ready).json["version"]
    venv.create(ready.room / "venv", with_pip=False)
    python = ready.room / "venv" / "bin" / "python"
    before = fake.snapshot(ready.room / "venv")

    def pip(*args):
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *args], env=ready.environment(), check=True, capture_output=True, timeout=120)

    pip("install", "--no-deps", "--no-compile", str(built(ready)))
    code = "import vllm, vllm._version as v, importlib.metadata as m; print(v.__version__, v.__version_tuple__[-1], m.version('vllm'), vllm.__patchset__, sep='|')"
    said = subprocess.run([str(python), "-B", "-c", code], capture_output=True, text=True, check=True, cwd=ready.room).stdout.strip().split("|")
    local = version.split("+")[1]
    assert said == [version, local, version, f"vllm-dcp-stack {local[3:]} on {fake.TAG}: alpha, beta, gamma"]
    installed = fake.snapshot(ready.room / "venv")
    assert all(data in installed.values() for data in COMPILED.values())
    pip("uninstall", "-y", "vllm")
    assert fake.snapshot(ready.room / "venv") == before


def test_same_input_same_bytes(ready):
    build(ready, env={"TZ": "Asia/Tokyo"})
    first = built(ready).read_bytes()
    build(ready, prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"))
    assert built(ready).read_bytes() == first


def test_another_stack_gives_another_version(ready):
    first = build(ready, "--dry-run").json["version"]
    ready.apply()
    fake.commit(ready.tree, {"vllm/envs.py": (ready.tree / "vllm/envs.py").read_bytes() + b"\nMORE = 1\n"}, fake.message("delta", "[Misc] More"))
    ready.run("export", ready.tree)
    assert build(ready, "--dry-run").json["version"] != first


def test_dry_run_writes_nothing(ready):
    done = build(ready, "--dry-run")
    assert done.json["files"]["vllm/old.py"] == "removed" and "sha256" not in done.json
    assert not out(ready).exists()


def test_the_official_wheel_is_downloaded_once(ready):
    assert "downloading the official wheel" in build(ready).err
    assert "downloading" not in build(ready, env={"PIP_FIND_LINKS": "/nowhere"}).err
    (kept,) = (ready.cache / "downloads").glob("*.whl")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert "is damaged or not the pinned file: downloading it again" in build(ready).err


def test_progress_is_shown(ready):
    err = build(ready).err
    assert "comparing the wheel with the source (" in err and "writing the wheel (" in err and "checking the new wheel (" in err


@pytest.mark.parametrize("path", ["csrc/kernels/a.cu", "cmake/utils.cmake", "CMakeLists.txt", "setup.py", "requirements/cuda.txt"])
def test_a_patch_of_a_compiled_source_is_refused(ready, path):
    ready.apply()
    fake.commit(ready.tree, {path: b"changed\n", "vllm/new.py": fake.SPDX.encode()}, fake.message("delta", "[Kernel] A kernel"))
    ready.run("export", ready.tree)
    done = build(ready, code=3, env={"PIP_FIND_LINKS": "/nowhere"})  # refused before anything is fetched
    assert f"- delta.patch: {path}" in done.err and "vllm/new.py" not in done.err and "make build" in done.err
    assert not out(ready).exists()


def test_a_wheel_with_other_python_files_is_refused(project):
    files = wheels.official_files()
    files["vllm/envs.py"] += b"# later\n"
    del files["vllm/no_newline.py"]
    wheels.add_official(project, files)
    done = build(project, code=3)
    assert "- vllm/envs.py: differs" in done.err and "- vllm/no_newline.py: not in the wheel" in done.err and "crlf" not in done.err
    assert not out(project).exists()


def test_files_that_the_official_build_replaces_may_differ_and_may_not_be_patched(project):
    files = wheels.official_files() | {"vllm/envs.py": b"# of another repository\n"}
    wheels.add_official(project, files)
    toml = project.folder() / "base.toml"
    whole = toml.read_text()
    toml.write_text('rebuilt = ["vllm/distributed/__init__.py"]\n' + whole)
    assert "- vllm/envs.py: differs" in build(project, code=3).err
    toml.write_text('rebuilt = ["vllm/envs.py"]\n' + whole)
    assert "- beta.patch: vllm/envs.py" in build(project, code=3).err
    files = wheels.official_files() | {"vllm/distributed/__init__.py": b"# of another repository\n"}
    wheels.add_official(project, files)
    toml.write_text(toml.read_text().replace('rebuilt = ["vllm/envs.py"]', 'rebuilt = ["vllm/distributed/__init__.py"]'))
    build(project)
    with zipfile.ZipFile(built(project)) as archive:
        assert archive.read("vllm/distributed/__init__.py") == b"# of another repository\n"


def test_a_tampered_wheel_is_refused(ready):
    path = ready.index / f"vllm-{VERSION}-cp38-abi3-{PLATFORM}.whl"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    done = build(ready, "--wheel", path, code=3)
    assert "is not the pinned wheel" in done.err and wheels.sha256(path) in done.err
    done = build(ready, code=3)  # the same from the index
    assert "the index serves other files than the pinned ones for vllm 1.2.3" in done.err
    assert not out(ready).exists() and not list((ready.cache / "downloads").glob("*.whl"))


@pytest.mark.parametrize(("name", "why"), [
    (f"vllm-9.9.9-cp38-abi3-{PLATFORM}.whl", "is version 9.9.9, the pin is 1.2.3"),
    ("vllm-1.2.3-cp38-abi3-manylinux_2_28_aarch64.whl", "is for manylinux_2_28_aarch64, wanted is manylinux_2_28_x86_64"),
    (f"other-1.2.3-cp38-abi3-{PLATFORM}.whl", "is not the name of a wheel of vLLM"),
    ("vllm.zip", "is not the name of a wheel of vLLM"),
])  # fmt: skip
def test_a_wheel_of_another_kind_is_refused(ready, name, why):
    path = ready.room / name
    path.write_bytes((ready.index / f"vllm-{VERSION}-cp38-abi3-{PLATFORM}.whl").read_bytes())
    assert why in build(ready, "--wheel", path, code=3).err
    assert not out(ready).exists()


def test_an_unknown_platform_names_the_known_ones(ready):
    done = ready.run("wheel", "--platform", "win_amd64", code=2)
    assert "'win_amd64'" in done.err and PLATFORM in done.err
    done = ready.run("wheel", "--ref", fake.OLD, "--platform", "x86_64", code=2)
    assert "pins no official wheel" in done.err


def test_a_wheel_that_is_no_archive_is_refused(project):
    path = project.index / f"vllm-{VERSION}-cp38-abi3-{PLATFORM}.whl"
    path.write_bytes(b"PK\3\4 and no more")
    wheels.pin_wheel(project, path)
    assert "cannot be read as a wheel" in build(project, "--wheel", path, code=3).err


def test_no_space_leaves_no_half_wheel(ready):
    build(ready, "--dry-run")  # warm cache
    code = "import shutil, collections\nU = collections.namedtuple('U', 'total used free')\nshutil.disk_usage = lambda p: U(1, 1, 1 << 20)\n"
    done = build(ready, code=3, env=wheels.saboteur(ready, code))
    assert "free are 1 MiB" in done.err and not list(out(ready).iterdir())
    done = build(ready, code=3, prefix=("prlimit", "--fsize=150000"), env={"PYTHONPATH": None})  # the disk fills while writing
    assert "File too large" in done.err and not list(out(ready).iterdir())


def test_a_killed_build_leaves_no_half_wheel(ready):
    build(ready)
    whole = built(ready).read_bytes()
    built(ready).unlink()
    code = "import os, signal\nreal = os.replace\ndef replace(a, b):\n    if str(b).endswith('.whl') and '/out/' in str(b):\n        os.kill(os.getpid(), signal.SIGKILL)\n    real(a, b)\nos.replace = replace\n"
    build(ready, code=-9, env=wheels.saboteur(ready, code))
    assert not list(out(ready).glob("*.whl")) and len(list(out(ready).iterdir())) == 1  # the scratch file
    build(ready, env={"PYTHONPATH": None})
    assert built(ready).read_bytes() == whole


def test_an_unwritable_folder_is_refused(ready):
    (ready.room / "out").write_text("a file")
    assert "cannot write in" in build(ready, code=3).err
