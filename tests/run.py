#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the CPU test suite; make what it needs first: a virtual environment and one patched tree for each base.

    python tests/run.py                       everything, as `make test` does
    python tests/run.py --suite v0.33.0       one suite: stack, or the tag of a base
    python tests/run.py --suite stack -- -k export -x     pytest arguments after --

Everything is made under build/ and kept for the next run. Tests that import vLLM run once for each base, since only one
vLLM can be imported in a process. vLLM chooses its platform from its own distribution metadata, so each tree gets some.
"""
import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
VENV = BUILD / "venv"
FOLDERS = ("distributed", "runtime", "kernels")
NO_TESTS = 5  # pytest's exit code
sys.path.insert(0, str(ROOT / "scripts"))

from patchstack.pins import Base, load_bases  # noqa: E402


def run(*command: str, env: dict[str, str] | None = None, cwd: pathlib.Path = ROOT) -> int:
    """Run a command, shown first; return its exit code."""
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}).returncode


def must(*command: str, **kwargs) -> None:
    code = run(*command, **kwargs)
    if code:
        sys.exit(f"error: `{' '.join(command)}` failed with exit code {code}")


def make_venv() -> pathlib.Path:
    """A virtual environment with exactly the requirements; made again when they change."""
    lists = [ROOT / "tests" / "requirements.txt", ROOT / "tests" / "requirements-nodeps.txt"]
    wanted = hashlib.sha256(b"".join(p.read_bytes() for p in lists) + sys.version.encode()).hexdigest()
    python = VENV / "bin" / "python"
    stamp = VENV / "requirements.sha256"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(VENV, ignore_errors=True)
        must(sys.executable, "-m", "venv", str(VENV))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = next(line for line in lists[0].read_text().splitlines() if line.startswith("torch=="))
        must(*pip, torch)
        must(*pip, "--requirement", str(lists[0]))
        must(*pip, "--no-deps", "--requirement", str(lists[1]))
        stamp.write_text(wanted)
    return python


def make_trees(base: Base) -> dict[str, str]:
    """The patched and the upstream tree of `base`, and its metadata; return the environment that imports them."""
    patched, upstream, site = (BUILD / "test" / f"{kind}-{base.tag}" for kind in ("patched", "upstream", "site"))
    must(sys.executable, "apply.py", "apply", "--ref", base.tag, "--dest", str(patched))
    if not upstream.exists():
        scratch = upstream.with_name(f".{upstream.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", str(patched), "archive", "refs/patchstack/base"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(scratch)], input=archive, check=True)
        version = patched / "vllm" / "_version.py"
        if version.exists():
            shutil.copy2(version, scratch / "vllm" / "_version.py")
        scratch.rename(upstream)
    info = site / f"vllm-{base.version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {base.version}+cpu\n")
    return {"PYTHONPATH": f"{patched}{os.pathsep}{site}", "VLLM_STACK_PATCHED_TREE": str(patched), "VLLM_STACK_UNPATCHED_TREE": str(upstream)}


def upstream_tests(base: Base) -> list[list[str]]:
    """pytest arguments of upstream's own tests of what we touch: one line each in tests/upstream/<tag>.txt."""
    path = ROOT / "tests" / "upstream" / f"{base.tag}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def main() -> int:
    bases = {b.tag: b for b in load_bases()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=["stack", *bases], help="run this suite only; may be given several times")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    python = make_venv()
    failed = []
    for suite in args.suite or ["stack", *bases]:
        started = time.monotonic()
        pytest = [str(python), "-m", "pytest", "-q", *args.pytest]
        if suite == "stack":
            ran = [(suite, run(*pytest, "-n", "2", "tests/stack"))]
        else:
            env = make_trees(bases[suite])
            # One process a folder: what a module leaves behind (threads, above all) does not reach the forked tests of the next.
            ran = [(f"{suite}: {folder}", run(*pytest, "-n", "2", "--base", suite, f"tests/{folder}", env=env)) for folder in FOLDERS]
            if args.pytest or any(code != NO_TESTS for _, code in ran):  # not every base has tests in every folder
                ran = [(name, 0 if code == NO_TESTS else code) for name, code in ran]
            for arguments in upstream_tests(bases[suite]) if not args.pytest else []:
                env_upstream = env | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_TARGET_DEVICE": "cpu"}
                ran.append((f"{suite}: upstream's {arguments[0]}", run(str(python), "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=",
                                                                        *arguments, env=env_upstream, cwd=pathlib.Path(env["VLLM_STACK_PATCHED_TREE"]))))  # fmt: skip
        failed += [f"{name} (exit code {code})" for name, code in ran if code]
        print(f"== {suite}: {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
