#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build vLLM from the patched source and install it."""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys

HELP = """\
Build vLLM from the patched source and install it into the Python that runs this.

Needs: Linux; a CUDA toolkit with its headers (CUDA_HOME, or nvcc on PATH) of the version that the release's torch was built
for; a C++17 compiler; for v0.33.0 a Rust toolchain (cargo); about 100 GB of disk and 4 GB of memory for each job. It takes
an hour or more on a large machine. MAX_JOBS, NVCC_THREADS and TORCH_CUDA_ARCH_LIST are vLLM's own and pass through.

The patched tree carries no release tag, so setuptools-scm is told the version: `<release>+dcp.<first 8 hex of the stack>`.
"""
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from patchstack.errors import Refused, StackError  # noqa: E402
from patchstack.lock import load_lock  # noqa: E402
from patchstack.pins import Base, find_base, load_bases  # noqa: E402


def find_cuda() -> pathlib.Path:
    """The CUDA toolkit, as torch looks for it. Raises Refused with what is missing."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    places = [named] if named else [p for p in (str(pathlib.Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda") if p]
    for place in map(pathlib.Path, places):
        if (place / "bin" / "nvcc").exists() and any((place / sub / "cuda_runtime.h").exists() for sub in ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")):
            return place
    raise Refused(f"no CUDA toolkit found (looked for bin/nvcc and cuda_runtime.h in {', '.join(places)}); the build was not started",
                  "install the CUDA toolkit that the release's torch was built for and set CUDA_HOME")  # fmt: skip


def check_machine(base: Base, tree: pathlib.Path) -> dict[str, str]:
    """The environment of the build. Raises Refused, before anything starts, if something is missing."""
    cuda = find_cuda()
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise Refused("no C++ compiler found; the build was not started", "install g++, or set CXX")
    if (tree / "rust").is_dir() and not shutil.which("cargo"):
        raise Refused(f"{base.tag} has Rust parts and there is no cargo on PATH; the build was not started", "install a Rust toolchain")
    version = f"{base.version}+dcp.{load_lock(base.folder).patchset[:8]}"
    return {"CUDA_HOME": str(cuda), "VLLM_TARGET_DEVICE": "cuda", "SETUPTOOLS_SCM_PRETEND_VERSION": version, "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM": version, "VLLM_VERSION_OVERRIDE": version}


def main() -> int:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref", default=None, help="a pinned release (default: the default base)")
    parser.add_argument("--dest", default=None, type=pathlib.Path, help="the patched tree (default: build/vllm-TAG; made if it is missing)")
    parser.add_argument("--dry-run", action="store_true", help="check the machine and show the command, build nothing")
    args = parser.parse_args()
    try:
        base = find_base(args.ref, load_bases())
        tree = args.dest or ROOT / "build" / f"vllm-{base.tag}"
        find_cuda()
        code = subprocess.run([sys.executable, str(ROOT / "apply.py"), "apply", "--ref", base.tag, "--dest", str(tree), "--verify"]).returncode
        if code:
            return code
        settings = check_machine(base, tree)
    except StackError as e:
        print(f"error: {e.message}\nnext: {e.next_step}", file=sys.stderr)
        return e.exit_code
    command = [sys.executable, "-m", "pip", "install", "--verbose", str(tree)]
    print(" ".join(f"{k}={v}" for k, v in settings.items()), " ".join(command), flush=True)
    return 0 if args.dry_run else subprocess.run(command, env={**os.environ, **settings}).returncode


if __name__ == "__main__":
    sys.exit(main())
