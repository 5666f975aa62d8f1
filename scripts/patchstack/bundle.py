# SPDX-License-Identifier: Apache-2.0
"""Parts that let an air-gapped GPU host with PyTorch run this project's GPU tests and benchmarks on the patched vLLM.

A bundle is a few *segments* (tar, xz), joined and cut into parts; what changes with the stack lies in the last part, alone. `bundle_entry.py` with the manifest filled in puts them together. Segments are compressed in blocks on all
cores and kept in the cache by the hash of what they hold.
"""
import concurrent.futures
import functools
import hashlib
import io
import json
import lzma
import os
import pathlib
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import cache, files, flash_attn_stub, wheel, wheelfile, workspace
from .downloads import pip_download, sha256
from .errors import Refused, Usage
from .lock import write_atomic
from .pins import Base
from .report import Ui
from .wheel import Patched

SCHEMA = 1
ENTRY = "run.py"
PLATFORM = "manylinux_2_28_x86_64"
PYTHON = (3, 12)
KINDS = ("layer", "engine")
_BLOCK = 24 << 20
_PRESET = 6
_PIP_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (34, 31, 28, 27, 26, 24, 17, 12, 5)), "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")

# Large, and not needed on Hopper by what the stack is for: flash-attention 2, the Rust front end, kernels of other models and of Blackwell.
LEFT_OUT = ("vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/vllm-rs", "vllm/_flashkda_C", "vllm/_deepselect_C", "vllm/_qutlass_C",
            "vllm/third_party/fmha_sm100/", "vllm/entrypoints/serve/instrumentator/static/")  # fmt: skip
# Flash-attention 3, which short prompts take by upstream's default, and experts. A layer alone does without.
_ENGINE_ONLY = ("vllm/vllm_flash_attn/_vllm_fa3_C", "vllm/_moe_C")
_STUBBED = ("vllm/vllm_flash_attn/__init__.py", "vllm/vllm_flash_attn/flash_attn_interface.py")
_STUB_PACKAGE = b'''\
# SPDX-License-Identifier: Apache-2.0
"""Stands for flash-attention in a bundle of vllm-dcp-stack."""
import pathlib

from . import flash_attn_interface
from .flash_attn_interface import *  # noqa: F403


def __getattr__(name):
    if (pathlib.Path(__file__).parent / name).is_dir():
        raise AttributeError(name)  # a sub-package that is not imported yet: python then imports it
    return getattr(flash_attn_interface, name)
'''
_NATIVE = "vllm/_C_stable_libtorch.abi3.so"
_KERNELS = re.compile(r"vllm/(third_party/deep_gemm/.*|[^/]+\.so)")
_PROJECT = ("tests", "bench", "pyproject.toml")
_CHANGING = ("vllm", "project")  # in parts of their own: all that a new version of the stack brings anew
_KEPT_FIELDS = re.compile(r"(?i)(Metadata-Version|Name|Version|License[-\w]*|Requires-Dist|Requires-Python|Provides-Extra):")


@dataclass(frozen=True)
class File:
    """One file of a segment; `read` gives its content."""

    path: str
    mode: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Packed:
    """A compressed segment in the cache."""

    name: str
    path: pathlib.Path
    sha256: str
    size: int
    unpacked: int


def requirements(base: Base, kind: str) -> tuple[list[str], list[str]]:
    """The pinned packages in patches/<base>/bundle.txt: (of the layer, of the engine only). Raises Usage."""
    path = base.folder / "bundle.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise Usage(f"{path} is missing: no bundle is described for {base.tag}", "write it: `name==version --hash=sha256:...` lines under `# layer` and `# engine`") from None
    groups: dict[str, list[str]] = {k: [] for k in KINDS}
    group = None
    for number, line in enumerate(lines, 1):
        if match := re.fullmatch(r"# (layer|engine)\b.*", line):
            group = match[1]
        elif line.strip() and not line.startswith("#"):
            if group is None or not re.fullmatch(r"[A-Za-z0-9_.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line):
                raise Usage(f"{path}:{number}: expected `name==version --hash=sha256:...` below `# layer` or `# engine`, found {line!r}")
            groups[group].append(line)
    return groups["layer"], groups["engine"] if kind == "engine" else []


def fetch_packages(lines: list[str], ui: Ui) -> list[pathlib.Path]:
    """The wheels of the requirement lines, in their order, from the cache or through pip; their hashes are checked."""
    folder = cache.root()
    files.check_writable(folder, cache.SET_ELSEWHERE)
    with files.locked(folder, ui.note):
        kept = cache.downloads() / "packages"
        kept.mkdir(parents=True, exist_ok=True)
        have = {sha256(p): p for p in kept.glob("*.whl")}
        missing = [line for line in lines if line.rsplit(":", 1)[1] not in have]
        if missing:
            ui.step(f"downloading {len(missing)} packages with pip")
            with workspace.scratch(kept.parent, cache.DOWNLOADING) as scratch:
                options = ["--only-binary", ":all:", "--python-version", ".".join(map(str, PYTHON)), "--implementation", "cp"]
                options += [part for tag in _PIP_PLATFORMS for part in ("--platform", tag)] + [part for abi in (f"cp{PYTHON[0]}{PYTHON[1]}", "abi3", "none") for part in ("--abi", abi)]
                for path in pip_download("the packages of the bundle", missing, scratch, options, ui):
                    found = sha256(path)
                    have[found] = path.replace(kept / path.name)
        return [have[line.rsplit(":", 1)[1]] for line in lines]


def _cut_metadata(data: bytes) -> bytes:
    """METADATA without its description and links."""
    head = data.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n", 1)[0].split("\n")
    return ("\n".join(line for line in head if _KEPT_FIELDS.match(line)) + "\n").encode()


def package_files(path: pathlib.Path) -> Iterator[File]:
    """What installing a wheel flat into one folder gives."""
    with wheelfile.opened(path) as archive:
        members = archive.infolist()
    for member in members:
        name = member.filename
        if member.is_dir() or name.endswith((".dist-info/RECORD", ".pth")):
            continue
        if match := re.fullmatch(r"[^/]+\.data/(purelib|platlib)/(.*)", name):
            name = match[2]
        elif re.match(r"[^/]+\.data/", name):
            continue  # scripts and headers
        yield File(f"site/{name}", (member.external_attr >> 16) & 0o777 or 0o644, _reader(path, member.filename))


def _reader(path: pathlib.Path, member: str) -> Callable[[], bytes]:
    def read() -> bytes:
        data = _archive(path).read(member)
        return _cut_metadata(data) if member.endswith(".dist-info/METADATA") else data

    return read


@functools.lru_cache(maxsize=4)
def _archive(path: pathlib.Path) -> zipfile.ZipFile:
    """An open wheel: its directory is read once, not once for each file."""
    return zipfile.ZipFile(path)


def left_out(kind: str) -> tuple[str, ...]:
    """How the paths of the wheel begin that do not travel."""
    return LEFT_OUT if kind == "engine" else (*LEFT_OUT, *_ENGINE_ONLY)


def vllm_files(patched: Patched, kind: str) -> Iterator[tuple[str, File]]:
    """(segment, file) of the patched vLLM, without what `left_out` names. In a layer bundle a stub stands for flash-attention."""
    with wheelfile.opened(patched.official) as archive:
        members = archive.infolist()
    info = f"vllm-{patched.base.version}.dist-info"
    kinds = wheel.kinds_of_change(patched, [m.filename for m in members])
    for member in members:
        path = member.filename
        if member.is_dir() or path.startswith(left_out(kind)) or path == f"{info}/RECORD" or kinds.get(path) == "removed":
            continue
        mode = (member.external_attr >> 16) & 0o777 or 0o644
        segment = "native" if path == _NATIVE else "engine-kernels" if path.startswith(_ENGINE_ONLY) else "kernels" if _KERNELS.fullmatch(path) and path not in kinds else "vllm"
        if path in _STUBBED and kind == "layer":
            data = pathlib.Path(flash_attn_stub.__file__).read_bytes() if path.endswith("interface.py") else _STUB_PACKAGE
            yield segment, File(f"site/{path}", mode, lambda data=data: data)
        elif path in kinds:
            yield segment, File(f"site/{path}", mode, lambda path=path: patched.changed[path])
        elif path == f"{info}/METADATA":
            read = _reader(patched.official, path)
            yield segment, File(f"site/{patched.renamed(path)}", mode, lambda read=read: wheel.metadata(patched, read().rstrip(b"\n") + b"\n\n"))
        else:
            yield segment, File(f"site/{patched.renamed(path)}", mode, _reader(patched.official, path))
    for path in sorted(p for p, kind in kinds.items() if kind == "added"):
        yield "vllm", File(f"site/{path}", 0o644, lambda path=path: patched.changed[path])
    yield "vllm", File(f"site/{patched.dist_info}/{wheel.PROVENANCE}", 0o644, lambda: wheel.provenance(patched, kinds))


def project_files(root: pathlib.Path) -> Iterator[File]:
    """The project's own tests and benchmarks."""
    for top in _PROJECT:
        for path in sorted([root / top] if (root / top).is_file() else (root / top).rglob("*")):
            parts = path.relative_to(root).parts
            if path.is_file() and not path.is_symlink() and "__pycache__" not in parts and not any(p.startswith(".") for p in parts) and parts[:2] != ("bench", "out"):
                yield File("project/" + "/".join(parts), 0o755 if os.access(path, os.X_OK) else 0o644, path.read_bytes)


def segments(patched: Patched, kind: str, root: pathlib.Path, ui: Ui) -> dict[str, list[File]]:
    """What goes into the bundle, most stable first; downloads what is missing."""
    layer, engine = requirements(patched.base, kind)
    found: dict[str, list[File]] = {name: [] for name in ("native", "kernels", "engine-kernels", "cutlass", "packages", "engine-packages", "vllm", "project")}
    for line, path in zip(layer + engine, fetch_packages(layer + engine, ui), strict=True):
        name = "cutlass" if path.name.startswith("nvidia_cutlass") else "packages" if line in layer else "engine-packages"
        found[name] += package_files(path)
    for name, file in vllm_files(patched, kind):
        found[name].append(file)
    found["project"] += project_files(root)
    return {name: sorted(listed, key=lambda f: f.path) for name, listed in found.items() if listed}


def _tar(listed: list[File], out: io.BufferedRandom) -> int:
    """Write a tar that depends on the files alone; return their size."""
    size = 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for file in listed:
            data = file.read()
            info = tarfile.TarInfo(file.path)
            info.size, info.mode = len(data), file.mode
            archive.addfile(info, io.BytesIO(data))
            size += len(data)
    return size


def pack(name: str, listed: list[File], ui: Ui) -> Packed:
    """Compress one segment, or find it in the cache."""
    kept = cache.root() / "bundle"
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=kept) as raw:
        unpacked = _tar(listed, raw)
        total = raw.tell()
        raw.seek(0)
        key = hashlib.sha256(f"xz {_PRESET} {_BLOCK}\n".encode() + hashlib.file_digest(raw, "sha256").digest()).hexdigest()
        target = kept / f"{name}-{key[:32]}.tar.xz"
        known = target.with_suffix(".sha256")  # of what was compressed then: what lies in a cache may have changed since
        if not (target.exists() and known.exists() and sha256(target) == known.read_text()):
            count = -(-total // _BLOCK)

            def compress(number: int) -> bytes:
                return lzma.compress(os.pread(raw.fileno(), _BLOCK, number * _BLOCK), preset=_PRESET)

            blocks = []
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                try:
                    for done, block in enumerate(pool.map(compress, range(count))):
                        ui.progress(f"compressing {name}, blocks", done, count)
                        blocks.append(block)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            ui.progress(f"compressing {name}, blocks", count, count)
            write_atomic(target, b"".join(blocks))
            write_atomic(known, sha256(target).encode())
    return Packed(name, target, sha256(target), target.stat().st_size, unpacked)


def write(patched: Patched, kind: str, packed: list[Packed], out: pathlib.Path, limit: int, ui: Ui) -> dict:
    """Write parts of at most `limit` bytes and the entry script into `out`, in one step; return the manifest."""
    if out.exists() and any(out.iterdir()) and not is_bundle(out):
        raise Refused(f"{out} exists and is no bundle, or holds other things too", "choose another --out; nothing was written")
    files.refuse_mounts(out)
    files.check_writable(out.parent)
    with files.locked(out.parent, ui.note), workspace.scratch(out.parent, f".{out.name}.patchstack-") as scratch:
        new = scratch / "bundle"
        new.mkdir()
        parts: list[dict] = []
        for group in ([p for p in packed if p.name not in _CHANGING], [p for p in packed if p.name in _CHANGING]):
            joined, left = _Joined(group), sum(p.size for p in group)
            while left:
                name, size, hasher = f"part-{len(parts) + 1}.bin", min(limit, left), hashlib.sha256()
                with (new / name).open("wb") as f:
                    while f.tell() < size:
                        block = joined.read(min(1 << 20, size - f.tell()))
                        f.write(block)
                        hasher.update(block)
                parts.append({"name": name, "offset": sum(p["size"] for p in parts), "size": size, "sha256": hasher.hexdigest()})
                left -= size
        offset, listed = 0, []
        for segment in packed:
            listed.append({"name": segment.name, "offset": offset, "size": segment.size, "sha256": segment.sha256, "unpacked": segment.unpacked})
            offset += segment.size
        manifest = {"schema": SCHEMA, "kind": kind, "base": patched.base.tag, "version": patched.version, "patchset": patched.lock.patchset, "python": list(PYTHON),
                    "segments": listed, "parts": parts}  # fmt: skip
        entry = pathlib.Path(__file__).with_name("bundle_entry.py").read_text(encoding="utf-8")
        line = "MANIFEST = {}  # filled in by `apply.py bundle`"
        if entry.count(line) != 1:
            raise RuntimeError(f"bundle_entry.py has the line {line!r} {entry.count(line)} times")
        (new / ENTRY).write_text(entry.replace(line, f"MANIFEST = json.loads(r'''{json.dumps(manifest, indent=1)}''')"), encoding="utf-8")
        (new / ENTRY).chmod(0o755)
        if out.exists():
            files.exchange(new, out)
        else:
            new.rename(out)
    return manifest


def is_bundle(folder: pathlib.Path) -> bool:
    """Whether `folder` holds a bundle and nothing else: it is replaced as a whole."""
    names = {path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    return {ENTRY, "part-1.bin"} <= names and all(path.name in names and re.fullmatch(rf"{re.escape(ENTRY)}|part-\d+\.bin", path.name) for path in folder.iterdir())


class _Joined(io.RawIOBase):
    """The compressed segments one after the other."""

    def __init__(self, packed: list[Packed]) -> None:
        self._left = [p.path for p in packed]
        self._stream: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            if self._stream is None:
                if not self._left:
                    return 0
                self._stream = self._left.pop(0).open("rb")
            if count := self._stream.readinto(buffer):
                return count
            self._stream.close()
            self._stream = None
