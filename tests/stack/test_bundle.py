# SPDX-License-Identifier: Apache-2.0
"""`bundle`: the parts give back what went in, wherever and however often they are put together; damage is named."""
import json
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from . import project as fake
from . import wheels

PART = 0.03  # MiB: many small parts


@pytest.fixture
def ready(project):
    """A project with an official wheel, two packages to bring, tests and a benchmark."""
    wheels.add_official(project)
    lines = {"layer": [], "engine": []}
    for group, name, files in (("layer", "nvidia_cutlass_dsl", {"nvidia_cutlass_dsl/dsl_packages/cutlass_fake.py": b"HERE = True\n", "nvidia_cutlass_dsl.pth": b"nvidia_cutlass_dsl/dsl_packages\n"}),
                               ("layer", "alib", {"alib/__init__.py": b"A = 1\n", "alib-1.0.data/purelib/blib.py": b"B = 2\n", "alib-1.0.data/scripts/x": b"no\n"}),
                               ("engine", "elib", {"elib.py": b"E = 3\n"})):  # fmt: skip
        path = wheels.write_wheel(project.index, name, "1.0", files)
        lines[group].append(f"{name.replace('_', '-')}==1.0 --hash=sha256:{wheels.sha256(path)}\n")
    (project.folder() / "bundle.txt").write_text("# layer: two\n" + "".join(lines["layer"]) + "# engine: one more\n" + "".join(lines["engine"]))
    fake.write_files(project.root, {"tests/test_x.py": b"def test_x():\n    import vllm\n", "tests/data/x.json": b"{}\n", "bench/b.py": b"print('bench')\n", "pyproject.toml": b"[project]\n", "tests/__pycache__/x.pyc": b"no"})
    return project


def out(project):
    return project.room / "bundle"


def build(project, *args, **options):
    return project.run("bundle", "--out", out(project), "--part-size", PART, "--json", *args, **options)


def enter(project, *command, parts=None, into=None, code=0, args=()):
    """Run the entry script with a plain Python."""
    line = [sys.executable, "-I", str(out(project) / "run.py"), "--parts", str(parts or out(project)), "--into", str(into or project.room / "into"), *args, *(("--", *command) if command else ())]
    done = subprocess.run(line, env=project.environment(), cwd=project.room, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done
    return done


def parts_of(project):
    return sorted(p for p in out(project).iterdir() if p.name != "run.py")


def test_parts_are_small_and_listed(ready):
    done = build(ready).json
    assert len(done["parts"]) > 5 and sum(p["size"] for p in done["parts"]) == sum(s["size"] for s in done["segments"])
    for part in done["parts"]:
        path = out(ready) / part["name"]
        assert path.stat().st_size == part["size"] <= PART * (1 << 20) and wheels.sha256(path) == part["sha256"]
    assert {p.name for p in out(ready).iterdir()} == {"run.py", *(p["name"] for p in done["parts"])}


def test_it_unpacks_to_the_patched_tree_without_what_is_left_out(ready):
    version = build(ready).json["version"]
    enter(ready, "python", "-c", "")
    found = fake.snapshot(ready.room / "into" / "site")
    wanted = {k: v for k, v in fake.patched_files().items() if k.startswith("vllm/")}
    assert {k: v for k, v in found.items() if k in wanted} == wanted
    assert found["vllm/_C_stable_libtorch.abi3.so*"] == wheels.COMPILED["vllm/_C_stable_libtorch.abi3.so"]
    assert not any("_vllm_fa" in k or "_moe_C" in k or "vllm-rs" in k or k == "vllm/old.py" for k in found)
    assert found["alib/__init__.py"] == b"A = 1\n" and found["blib.py"] == b"B = 2\n" and "elib.py" not in found
    metadata = found[f"vllm-{version}.dist-info/METADATA"].decode()
    assert f"Version: {version}\n" in metadata and "invalid" not in metadata and f"vllm-{version}.dist-info/dcp_stack.json" in found
    assert found["alib-1.0.dist-info/METADATA"] == b"Metadata-Version: 2.4\nName: alib\nVersion: 1.0\nRequires-Dist: torch\n"
    assert fake.snapshot(ready.room / "into" / "project") == {"tests/test_x.py": b"def test_x():\n    import vllm\n", "tests/data/x.json": b"{}\n", "bench/b.py": b"print('bench')\n", "pyproject.toml": b"[project]\n"}


def test_an_engine_has_flash_attention_3_and_experts(ready):
    """And the real module of flash-attention, not the stub."""
    segments = {s["name"] for s in build(ready, "--engine").json["segments"]}
    assert {"engine-kernels", "engine-packages"} <= segments
    enter(ready, "true")
    found = fake.snapshot(ready.room / "into" / "site")
    for name in ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"):
        assert found[f"{name}*"] == wheels.COMPILED[name]
    assert not any("_vllm_fa2_C" in k or "vllm-rs" in k for k in found)
    assert found["vllm/vllm_flash_attn/flash_attn_interface.py"] == wheels.GENERATED["vllm/vllm_flash_attn/flash_attn_interface.py"]


def test_the_command_runs_with_the_bundle_s_packages(ready):
    version = build(ready, "--engine").json["version"]
    code = "import os, vllm._version as v, alib, blib, elib, cutlass_fake; print(v.__version__, os.getcwd(), os.environ['VLLM_STACK_TEST_DEVICE'], os.environ['HF_HUB_OFFLINE'])"
    said = enter(ready, "python", "-c", code).stdout.split()
    assert said == [version, str(ready.room / "into" / "project"), "cuda", "1"]
    assert enter(ready, "python", "bench/b.py").stdout == "bench\n"
    assert enter(ready, "pwd", args=("--cwd", str(ready.room))).stdout.strip() == str(ready.room)
    assert f"export PYTHONPATH='{ready.room}/into/site:" in enter(ready).stdout
    enter(ready, "python", "-c", "raise SystemExit(7)", code=7)
    assert "cannot run no-such-program" in enter(ready, "no-such-program", code=1).stderr


def test_the_flash_attention_stub_stands_in(ready):
    build(ready)
    code = """
import vllm.vllm_flash_attn as fa
from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata
assert not is_fa_version_supported(3) and fa.FA2_AVAILABLE is False
from vllm.vllm_flash_attn import cute  # a real sub-package, not a name that the stub answers for
from vllm.vllm_flash_attn.cute import utils
assert utils.REAL and cute.utils is utils
for f in (flash_attn_varlen_func, get_scheduler_metadata):
    try:
        f()
    except RuntimeError as e:
        print(e)
"""
    enter(ready, "true")
    sub = ready.room / "into/site/vllm/vllm_flash_attn/cute"
    sub.mkdir()
    (sub / "utils.py").write_text("REAL = True\n")
    said = enter(ready, "python", "-c", code).stdout
    assert said.count("the bundle of vllm-dcp-stack leaves flash-attention out") == 2 and "flash_attn_varlen_func" in said


def test_parts_under_any_name_in_any_order(ready):
    build(ready)
    other = ready.room / "carried"
    other.mkdir()
    for number, path in enumerate(reversed(parts_of(ready))):
        shutil.copy2(path, other / f"x{number}")
    (other / "something else").write_text("not a part")
    enter(ready, "python", "-c", "import alib", parts=other)


def test_running_twice_does_nothing_twice(ready):
    build(ready)
    enter(ready, "true")
    into = ready.room / "into"
    before = {p: p.stat().st_mtime_ns for p in into.rglob("*") if p.is_file()}
    for path in parts_of(ready):
        path.unlink()
    assert enter(ready, "true").stderr.replace("warning", "") == enter(ready, "true").stderr.replace("warning", "")
    assert "unpacking" not in enter(ready, "true").stderr
    assert {p: p.stat().st_mtime_ns for p in into.rglob("*") if p.is_file()} == before


def test_missing_and_damaged_parts_are_named(ready):
    build(ready)
    first, second, third, *_ = parts_of(ready)
    first.unlink()
    data = bytearray(second.read_bytes())
    data[100] ^= 1
    second.write_bytes(data)
    third.write_bytes(third.read_bytes()[:-1])
    done = enter(ready, "true", code=1)
    assert f"- {first.name} is missing" in done.stderr and f"- {second.name} is damaged" in done.stderr and f"- {third.name} is damaged" in done.stderr
    assert done.stderr.count("\n- ") == 3 and not (ready.room / "into" / "site").exists()


def test_an_unpacking_that_was_killed_is_done_again(ready):
    build(ready)
    enter(ready, "true")
    into = ready.room / "into"
    whole = fake.snapshot(into / "site")
    (into / ".bundle" / "packages.json").write_text('{"sha256": "')  # cut short
    (into / ".bundle" / "vllm.json").unlink()  # killed before the end
    (into / "site/alib/__init__.py").write_bytes(b"half")
    (into / "site/vllm/envs.py").unlink()
    done = enter(ready, "true")
    assert "unpacking packages (1 of 2" in done.stderr and "unpacking vllm (2 of 2" in done.stderr
    assert fake.snapshot(into / "site") == whole


def test_a_new_stack_brings_its_own_parts_only(ready):
    before = build(ready).json
    enter(ready, "true")
    ready.apply()
    fake.commit(ready.tree, {"vllm/envs.py": (ready.tree / "vllm/envs.py").read_bytes() + b"\nMORE = 1\n", "vllm/gamma.py": None}, fake.message("delta", "[Misc] More"))
    ready.run("export", ready.tree)
    after = build(ready).json
    old = {p["sha256"] for p in before["parts"]}
    new = [p for p in after["parts"] if p["sha256"] not in old]
    assert 0 < len(new) < len(after["parts"]) and {p["name"] for p in new} <= {p["name"] for p in after["parts"][-2:]}
    for part in after["parts"]:
        if part not in new:
            (out(ready) / part["name"]).unlink()
    done = enter(ready, "python", "-c", "import vllm.envs as e; print(hasattr(e, 'MORE') or 'MORE' in vars(e))")
    assert "unpacking vllm (1 of" in done.stderr and "native" not in done.stderr
    site = ready.room / "into/site"
    assert b"MORE = 1" in (site / "vllm/envs.py").read_bytes() and not (site / "vllm/gamma.py").exists()
    assert [p.name for p in site.glob("vllm-*.dist-info")] == [f"vllm-{after['version']}.dist-info"]


def test_same_input_same_bytes(ready):
    build(ready)
    first = fake.snapshot(out(ready))
    shutil.rmtree(out(ready))
    shutil.rmtree(ready.cache / "bundle")
    build(ready, env={"TZ": "Asia/Tokyo"})
    assert fake.snapshot(out(ready)) == first


def test_segments_are_compressed_once(ready):
    assert "compressing native" in build(ready).err
    assert "compressing" not in build(ready).err


def test_a_segment_of_the_cache_that_changed_is_made_anew(ready):
    build(ready)
    first = fake.snapshot(out(ready))
    for path in (ready.cache / "bundle").glob("native-*.tar.xz"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    done = build(ready)
    assert "compressing native" in done.err and "compressing kernels" not in done.err
    assert fake.snapshot(out(ready)) == first


def test_nothing_names_this_machine(ready):
    build(ready)
    enter(ready, "true")
    everything = b"\n".join([(out(ready) / "run.py").read_bytes(), *fake.snapshot(ready.room / "into" / "project").values()])
    for word in (str(ready.room), str(pathlib.Path.home()), socket.gethostname(), "http:", "https:"):
        assert word.encode() not in everything, word


def test_a_folder_that_is_no_bundle_is_kept(ready):
    out(ready).mkdir()
    (out(ready) / "mine").write_text("x")
    assert "exists and is no bundle" in build(ready, code=3).err
    assert [p.name for p in out(ready).iterdir()] == ["mine"]


def test_a_killed_build_leaves_the_old_bundle(ready):
    build(ready)
    before = fake.snapshot(out(ready))
    (ready.root / "tests/test_y.py").write_text("")
    code = "import ctypes, os, signal, pathlib\nreal = pathlib.Path.write_text\ndef write_text(self, *a, **k):\n    if self.name == 'run.py':\n        os.kill(os.getpid(), signal.SIGKILL)\n    return real(self, *a, **k)\npathlib.Path.write_text = write_text\n"
    build(ready, code=-9, env=wheels.saboteur(ready, code))
    assert fake.snapshot(out(ready)) == before
    build(ready, env={"PYTHONPATH": None})
    assert fake.snapshot(out(ready)) != before and [p.name for p in ready.room.glob(".bundle.*")] == []


def test_dry_run_writes_nothing(ready):
    done = build(ready, "--dry-run").json
    assert done["files"]["native"] == 1 and not out(ready).exists()


@pytest.mark.parametrize(("text", "why"), [
    ("alib==1.0\n", "bundle.txt:1: expected"),
    ("# layer\nalib==1.0 --hash=sha256:12\n", "bundle.txt:2: expected"),
    (None, "bundle.txt is missing"),
])  # fmt: skip
def test_a_bad_list_of_packages_is_a_usage_error(ready, text, why):
    path = ready.folder() / "bundle.txt"
    path.unlink() if text is None else path.write_text(text)
    assert why in build(ready, code=2).err


def test_a_package_with_another_hash_is_refused(ready):
    wheels.write_wheel(ready.index, "alib", "1.0", {"alib/__init__.py": b"evil = 1\n"})
    assert "the index serves other files than the pinned ones" in build(ready, code=3).err
    assert not out(ready).exists()


def test_lint_knows_the_list_of_packages(ready):
    assert "bundle.txt" not in ready.run("lint", code=None).out
    json.loads(build(ready).out)


# ------------------------------------------------------------------------------------------------ NCCL of the host


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_an_old_nccl_gets_what_vllm_asks_for(tmp_path, capsys):
    """vLLM turns PyNCCL off where ncclCommSuspend is missing."""
    from scripts.patchstack import bundle_entry

    libraries = {}
    for name, source in (("old", "int ncclGetVersion(int *v) { *v = 22809; return 0; }"), ("new", "int ncclCommSuspend(void *c, int f) { return 0; }")):
        libraries[name] = tmp_path / name / "libnccl.so.2"
        libraries[name].parent.mkdir()
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-x", "c", "-", "-o", libraries[name]], input=source, text=True, check=True)
    assert bundle_entry.with_suspend(libraries["new"], tmp_path / "into") is None and not (tmp_path / "into").exists()
    found = bundle_entry.with_suspend(libraries["old"], tmp_path / "into")
    # In a process of its own: this one has loaded a library of that name.
    code = "import ctypes, sys; n = ctypes.CDLL(sys.argv[1]); v = ctypes.c_int(); n.ncclGetVersion(ctypes.byref(v)); print(v.value, n.ncclCommSuspend(None, 0), n.ncclCommResume(None))"
    assert subprocess.run([sys.executable, "-c", code, found], capture_output=True, text=True, check=True).stdout.split() == ["22809", "5", "5"]
    assert bundle_entry.with_suspend(libraries["old"], tmp_path / "into") == found and {p.name for p in found.parent.iterdir()} == {found.name}


def test_an_old_nccl_without_a_compiler_is_told(tmp_path, monkeypatch, capsys):
    from scripts.patchstack import bundle_entry

    monkeypatch.setattr(bundle_entry.ctypes, "CDLL", lambda path: object())
    monkeypatch.setattr(bundle_entry.shutil, "which", lambda name: None)
    assert bundle_entry.with_suspend(tmp_path / "libnccl.so.2", tmp_path / "into") is None
    assert "PyNCCL will be off" in "".join(capsys.readouterr())
