#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Assemble a bundle of vllm-dcp-stack and run a command with it. Needs Python 3.12 for the packages inside, nothing else.

    python run.py --parts DIR --into DIR -- COMMAND...

The parts may lie in DIR under any name and in any order; what is unpacked already is not unpacked again, and then its parts
are not needed either. COMMAND runs in the project's folder (DIR/project), with PYTHONPATH and the environment set; without
one, the variables are printed. `python` in COMMAND is this Python.
"""
import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import io
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

MANIFEST = {}  # filled in by `apply.py bundle`

ENVIRONMENT = {  # only where the caller has not set them
    "VLLM_STACK_TEST_DEVICE": "cuda", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_PLUGINS": "",  # b12x brings plugins of its own
}  # fmt: skip


class Span(io.RawIOBase):
    """Bytes `offset` to `offset + size` of the joined parts; `digest` is that of what was read."""

    def __init__(self, parts, found, offset, size):
        self._parts, self._found, self._at, self._end = parts, found, offset, offset + size
        self.digest = hashlib.sha256()

    def readable(self):
        return True

    def readinto(self, buffer):
        if self._at >= self._end:
            return 0
        part = next(p for p in self._parts if p["offset"] <= self._at < p["offset"] + p["size"])
        with open(self._found[part["name"]], "rb") as f:
            f.seek(self._at - part["offset"])
            data = f.read(min(len(buffer), self._end - self._at))
        if not data:
            sys.exit(f"error: {part['name']} became shorter while it was read")
        self.digest.update(data)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def find_parts(folder, wanted):
    """name -> path of each wanted part, by size and hash, whatever the file is called. Ends the program, naming those that are missing or damaged."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file()] if folder.is_dir() else []
    by_size = {}
    for path in files:
        by_size.setdefault(path.stat().st_size, []).append(path)
    found, wrong = {}, []
    for part in wanted:
        match = next((p for p in by_size.get(part["size"], []) if sha256(p) == part["sha256"]), None)
        if match:
            found[part["name"]] = match
        elif (folder / part["name"]).is_file():
            wrong.append(f"{part['name']} is damaged: expected {part['size']} bytes with sha256 {part['sha256']}")
        else:
            wrong.append(f"{part['name']} is missing ({part['size']} bytes, sha256 {part['sha256']})")
    if wrong:
        sys.exit(f"error: the bundle in {folder} is not whole:\n" + "\n".join(f"- {w}" for w in wrong) + "\nnext: bring these parts and run the same command again")
    return found


def remove(into, record):
    """Take away what a segment unpacked, and the folders that are empty then."""
    for name in record["files"]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (into / name).unlink()
    for folder in sorted({str(p) for name in record["files"] for p in pathlib.PurePath(name).parents if str(p) != "."}, key=len, reverse=True):
        shutil.rmtree(into / folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):
            (into / folder).rmdir()


def unpack(into, segment, parts, found):
    """Unpack one segment; return the files it has."""
    span = Span(parts, found, segment["offset"], segment["size"])
    names = []
    with lzma.LZMAFile(io.BufferedReader(span, 1 << 20)) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not member.isreg():
                sys.exit(f"error: {segment['name']} holds {member.name!r}, which is no plain file below the folder")
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                target.unlink()
            with archive.extractfile(member) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            target.chmod(member.mode & 0o777)
            names.append(member.name)
    while span.read(1 << 20):
        pass
    if span.digest.hexdigest() != segment["sha256"]:
        sys.exit(f"error: the segment {segment['name']} is damaged")
    return names


def assemble(folder, into):
    """Make `into` what the manifest says; do only what is not done yet."""
    state = into / ".bundle"
    state.mkdir(parents=True, exist_ok=True)
    lock = os.open(state, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = {}
        for path in state.glob("*.json"):
            try:
                records[path.stem] = json.loads(path.read_text())
            except ValueError:  # cut short: counts as absent
                records[path.stem] = {"sha256": None, "files": []}
        wanted = {s["name"]: s for s in MANIFEST["segments"]}
        missing = [s for s in MANIFEST["segments"] if records.get(s["name"], {}).get("sha256") != s["sha256"]]
        needed = [p for p in MANIFEST["parts"] if any(p["offset"] < s["offset"] + s["size"] and s["offset"] < p["offset"] + p["size"] for s in missing)]
        found = find_parts(folder, needed) if needed else {}
        room = sum(s["unpacked"] for s in missing)
        if missing and shutil.disk_usage(into).free < room:
            sys.exit(f"error: {into} needs {room >> 20} MiB of free space")
        for name, record in records.items():
            if name not in wanted or wanted[name] in missing:
                remove(into, record)
                (state / f"{name}.json").unlink()
        for number, segment in enumerate(missing, 1):
            say(f"unpacking {segment['name']} ({number} of {len(missing)}, {segment['unpacked'] >> 20} MiB)")
            names = unpack(into, segment, MANIFEST["parts"], found)
            scratch = state / f".{segment['name']}"
            scratch.write_text(json.dumps({"sha256": segment["sha256"], "files": names}))
            scratch.replace(state / f"{segment['name']}.json")
    finally:
        os.close(lock)


def host_nccl():
    """The NCCL that PyTorch brought, or None."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (library := pathlib.Path(folder) / "lib" / "libnccl.so.2").exists():
                return library
    return None


# The interface of NCCL 2.29.7, as far as vLLM asks for it. 5 is ncclInvalidUsage.
SUSPEND = "int ncclCommSuspend(void *comm, int flags) { return 5; }\nint ncclCommResume(void *comm) { return 5; }\n"


def with_suspend(nccl, into):
    """A library that is `nccl` (a path) and has ncclCommSuspend and ncclCommResume, or None if `nccl` has them itself.

    vLLM v0.33.0 does without PyNCCL, and says nothing, where they are missing: before NCCL 2.29.7. Only its sleep mode calls
    them, which here is an error.
    """
    if hasattr(ctypes.CDLL(str(nccl)), "ncclCommSuspend"):
        return None
    target = into / "nccl" / "libnccl_and_suspend.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not target.exists() and compiler:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{os.urandom(8).hex()}.so")
        line = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(scratch), "-Wl,--no-as-needed", str(nccl), f"-Wl,-rpath,{nccl.parent}"]
        done = subprocess.run(line, input=SUSPEND, capture_output=True, text=True)
        if done.returncode:
            say(f"warning: {' '.join(line)}: {done.stderr.strip()}")
        else:
            scratch.replace(target)
    if not target.exists():
        say(f"warning: {nccl} is older than 2.29.7 and needs a C compiler here to serve vLLM: PyNCCL will be off, several GPUs will not work")
        return None
    return target


def environment(into):
    """The variables that the command needs; what the caller has set stays, PYTHONPATH goes in front of theirs."""
    site = into / "site"
    # `pip install --target` and this script do not read .pth files: the CuTe DSL's folder is named here.
    paths = [site, site / "nvidia_cutlass_dsl" / "dsl_packages", into / "project"]
    ours = {k: v for k, v in ENVIRONMENT.items() if k not in os.environ}
    ours["PYTHONPATH"] = os.pathsep.join([*(str(p) for p in paths if p.is_dir()), *filter(None, [os.environ.get("PYTHONPATH")])])
    if "VLLM_CACHE_ROOT" not in os.environ:
        ours["VLLM_CACHE_ROOT"] = str(into / "cache")
    if "CUDA_HOME" not in os.environ:  # DeepGEMM compiles its kernels with nvcc when they are first used
        nvcc = shutil.which("nvcc") or next((str(p) for p in [pathlib.Path("/usr/local/cuda/bin/nvcc")] if p.exists()), None)
        if nvcc:
            ours["CUDA_HOME"] = str(pathlib.Path(nvcc).resolve().parents[1])
    if "VLLM_NCCL_SO_PATH" not in os.environ and (nccl := host_nccl()) and (library := with_suspend(nccl, into)):
        ours["VLLM_NCCL_SO_PATH"] = str(library)
    return ours


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent, help="where the parts lie (default: beside this script)")
    parser.add_argument("--into", type=pathlib.Path, required=True, help="the directory to unpack into; kept for the next run")
    parser.add_argument("--cwd", type=pathlib.Path, default=None, help="run the command there, not in the project's folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command to run")
    args = parser.parse_args()
    into = args.into.resolve()
    if sys.version_info[:2] != tuple(MANIFEST["python"]):
        say(f"warning: the packages inside are for Python {'.'.join(map(str, MANIFEST['python']))}, this is {sys.version.split()[0]}")
    assemble(args.parts.resolve(), into)
    ours = environment(into)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        print("".join(f"export {k}='{v}'\n" for k, v in sorted(ours.items())), end="")
        return 0
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    os.chdir(args.cwd or into / "project")
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, {**os.environ, **ours})
    except OSError as e:
        sys.exit(f"error: cannot run {command[0]}: {e.strerror}")


if __name__ == "__main__":
    sys.exit(main())
