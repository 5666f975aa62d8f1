# SPDX-License-Identifier: Apache-2.0
"""The official wheel of a pin with the patched Python files laid in. Nothing is compiled, and nothing of the wheel is run.

The wheel must be the pinned file (by hash) and hold the same Python files as the pinned tree: only then does a patch made
for the tree fit it.
"""
import json
import os
import pathlib
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

from . import cache, files, stack, wheelfile, workspace
from .downloads import pip_download, sha256
from .errors import Refused, Usage
from .git import Git
from .installed import PROVENANCE
from .lock import Lock, load_lock
from .overlay import blob_id
from .pins import Base
from .report import Ui
from .trees import GitTree
from .upstream import check_version, fetch

SCHEMA = 1
_VERSION_FILE = "vllm/_version.py"
_ROOM = 64 << 20  # what a patched wheel may be larger than the official one

# What the build reads and the official wheel was made from: a change there needs a compiler, or new metadata.
COMPILED = ("csrc/", "cmake/", "rust/", "requirements/", "CMakeLists.txt", "setup.py", "pyproject.toml", "rust-toolchain.toml", "MANIFEST.in")


@dataclass(frozen=True)
class Patched:
    """What to write. `changed`: path in the wheel -> new content, None where the stack deletes it. `left_out`: touched paths that no wheel carries."""

    base: Base
    lock: Lock
    platform: str
    official: pathlib.Path
    version: str
    changed: dict[str, bytes | None]
    left_out: tuple[str, ...]

    @property
    def old_prefix(self) -> str:
        return f"vllm-{self.base.version}."

    @property
    def dist_info(self) -> str:
        return f"vllm-{self.version}.dist-info"

    def renamed(self, path: str) -> str:
        """Where a member of the official wheel goes: its dist-info and data folders carry the version."""
        return f"vllm-{self.version}.{path.removeprefix(self.old_prefix)}" if path.startswith(self.old_prefix) else path


def choose_platform(base: Base, wanted: str | None) -> str:
    """The pinned platform that `wanted` names: a tag, or a machine such as aarch64. None: this machine. Raises Usage."""
    if not base.wheels:
        raise Usage(f"{base.folder / 'base.toml'} pins no official wheel of {base.tag}", "add a table [wheels]: platform tag = sha256")
    name = wanted or os.uname().machine
    found = [tag for tag in base.wheels if tag == name or tag.endswith(f"_{name}")]
    if len(found) != 1:
        raise Usage(f"no pinned wheel of {base.tag} for the platform {name!r}; there are: {', '.join(sorted(base.wheels))}", "give one of them as --platform")
    return found[0]


def refuse_compiled(patched: stack.StackFiles) -> None:
    """Refuse a stack that touches what the compiled part of the official wheel was built from."""
    wrong = [f"{patch.path.name}: {path}" for patch in patched.patches for path in patch.paths if path.startswith(COMPILED) or path in patched.base.rebuilt]
    wrong += [f"overlay: {path}" for path in patched.overlay if path.startswith(COMPILED)]
    if wrong:
        raise Refused("the official wheel cannot carry this stack, which changes what the wheel was built from:\n" + "\n".join(f"- {w}" for w in wrong),
                      f"build from source: `python apply.py apply --ref {patched.base.tag}`, then `make build`")  # fmt: skip


def official_wheel(base: Base, platform: str, given: pathlib.Path | None, ui: Ui) -> pathlib.Path:
    """The pinned wheel: `given`, or from the cache, or through pip. Its name and hash are checked. Raises Refused or Unavailable."""
    if given is not None:
        _check_name(base, platform, given)
        _check_hash(base, platform, given)
        return given
    folder = cache.root()
    if not folder.is_dir():
        files.check_writable(folder, cache.SET_ELSEWHERE)
    with files.locked(folder, ui.note):
        downloads = cache.downloads()
        for kept in downloads.glob(f"vllm-{base.version}-*-{platform}.whl"):
            if sha256(kept) == base.wheels[platform]:
                return kept
            ui.note(f"{kept} is damaged or not the pinned file: downloading it again")
            kept.unlink()
        files.check_writable(downloads, cache.SET_ELSEWHERE)
        ui.step(f"downloading the official wheel of vLLM {base.version} for {platform} with pip (several hundred MB)")
        with workspace.scratch(downloads, cache.DOWNLOADING) as scratch:
            found = pip_download(f"vllm {base.version} for {platform}", [f"vllm=={base.version} --hash=sha256:{base.wheels[platform]}"], scratch,
                                 ["--only-binary", ":all:", "--platform", platform, "--python-version", "3.12", "--implementation", "cp", "--abi", "abi3"], ui)  # fmt: skip
            if len(found) != 1:
                raise Refused(f"pip downloaded {[p.name for p in found]}, expected one wheel")
            _check_name(base, platform, found[0])
            _check_hash(base, platform, found[0])
            return found[0].replace(downloads / found[0].name)


def _check_name(base: Base, platform: str, path: pathlib.Path) -> None:
    if not path.is_file():
        raise Usage(f"{path} is not a file")
    match = wheelfile.NAME.fullmatch(path.name)
    if not match or match["name"] != "vllm":
        raise Refused(f"{path.name} is not the name of a wheel of vLLM", f"give the official vllm-{base.version}-...-{platform}.whl")
    if match["version"] != base.version:
        raise Refused(f"{path.name} is version {match['version']}, the pin is {base.version}", "give the wheel of the pinned release, or another --ref")
    if match["platform"] != platform:
        raise Refused(f"{path.name} is for {match['platform']}, wanted is {platform}", "give the wheel of that platform, or another --platform")


def _check_hash(base: Base, platform: str, path: pathlib.Path) -> None:
    found = sha256(path)
    if found != base.wheels[platform]:
        raise Refused(f"{path} is not the pinned wheel of {base.tag} for {platform}:\n  expected sha256 {base.wheels[platform]}\n  found           {found}",
                      "it was changed or is another build: fetch it again")  # fmt: skip


def prepare(base: Base, platform: str, source: str, given: pathlib.Path | None, ui: Ui) -> Patched:
    """Build the stack, check it against the lock and the wheel, and say what goes into the patched wheel. Writes nothing but the cache."""
    patched = stack.read_stack(base)
    lock = load_lock(base.folder)
    stack.check_inputs(patched, lock)
    refuse_compiled(patched)
    official = official_wheel(base, platform, given, ui)
    upstream = fetch(base, source, ui)
    with Git.scratch(upstream.git_dir, log=ui.git) as git:
        level = stack.check_base(git, base, lock, upstream.commit, f"the {upstream.kind} source")
        built = stack.build(git, upstream.commit, patched.patches, patched.overlay, ui)
        stack.check_result(lock, built, level)
        before, after = GitTree(git, upstream.commit), GitTree(git, built.commit)
        with wheelfile.opened(official) as archive:
            _compare(base, archive, before, ui)
            members = set(archive.namelist())
            version_file = archive.read(_VERSION_FILE)
        touched = sorted(lock.touched)
        changed = {path: after.read(path) for path in touched if path.startswith("vllm/")}
    check_version(base, version_file)
    name = f"dcp{lock.patchset[:8]}"
    changed[_VERSION_FILE] = _version_file(base, version_file, name, summary(base, lock))
    return Patched(base, lock, platform, official, f"{base.version}+{name}", {p: d for p, d in changed.items() if d is not None or p in members},
                   tuple(p for p in touched if not p.startswith("vllm/")))  # fmt: skip


def _compare(base: Base, archive: zipfile.ZipFile, tree: GitTree, ui: Ui) -> None:
    """Refuse a wheel that does not hold the Python files of the pinned tree, naming those that differ."""
    members = archive.infolist()
    wrong = []
    for number, member in enumerate(members):
        ui.progress("comparing the wheel with the source", number, len(members))
        wanted = tree.blob(member.filename)
        if wanted and member.filename not in base.rebuilt and blob_id(archive.read(member)) != wanted:
            wrong.append(f"{member.filename}: differs")
    ui.progress("comparing the wheel with the source", len(members), len(members))
    have = {m.filename for m in members}
    wrong += [f"{path}: not in the wheel" for path in tree.paths() if path.startswith("vllm/") and path.endswith(".py") and path not in have]
    if _VERSION_FILE not in have:
        wrong.append(f"{_VERSION_FILE}: not in the wheel")
    if wrong:
        shown = "".join(f"\n- {w}" for w in wrong[:20]) + (f"\n- and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise Refused(f"the official wheel of {base.tag} does not hold the Python files of its source:{shown}", "the patches fit the source only: build from source instead (`make build`)")


def summary(base: Base, lock: Lock) -> str:
    """One line that names the stack: `vllm.__patchset__` of the patched wheel."""
    return f"vllm-dcp-stack {lock.patchset[:8]} on {base.tag}: {', '.join(p.topic for p in lock.patches) or 'no patch'}"


def _version_file(base: Base, data: bytes, local: str, patchset: str) -> bytes:
    """vllm/_version.py, which the build generates, with the local version and `vllm.__patchset__` set on import."""
    text = data.decode()
    text, versions = re.subn(rf"(?m)^((?:__version__ = )?version = ['\"]){re.escape(base.version)}(['\"])", rf"\g<1>{base.version}+{local}\g<2>", text)
    text, tuples = re.subn(r"(?m)^((?:__version_tuple__ = )?version_tuple = \([^)]*?),?\)", rf"\g<1>, '{local}')", text)
    if versions != 1 or tuples != 1:
        raise Refused(f"{_VERSION_FILE} of the official wheel does not set the version {base.version} in a known way", "report it: this release needs a change in wheel.py")
    return (text.rstrip("\n") + f"\n\nimport vllm  # noqa: E402\n\nvllm.__patchset__ = {patchset!r}\n").encode()


def provenance(patched: Patched, kinds: dict[str, str]) -> bytes:
    """The file that says what the wheel is made of: dist-info/dcp_stack.json."""
    base, lock = patched.base, patched.lock
    data = {
        "schema": SCHEMA,
        "stack": "vllm-dcp-stack",
        "patchset": lock.patchset,
        "base": {"tag": base.tag, "commit": base.commit, "tree": lock.base_tree, "sdist_sha256": base.sdist_sha256},
        "official_wheel": {"name": patched.official.name, "sha256": base.wheels[patched.platform]},
        "patches": [{"topic": p.topic, "sha256": p.sha256, "patch_id": p.patch_id} for p in lock.patches],
        "overlay": {path: blob.split(" ")[1] for path, blob in sorted(lock.overlay.items())},
        "result_tree": lock.result_tree,
        "files": dict(sorted(kinds.items())),
    }
    return (json.dumps(data, indent=1) + "\n").encode()


def kinds_of_change(patched: Patched, members: Sequence[str]) -> dict[str, str]:
    """path -> replaced, added or removed."""
    have = set(members)
    return {path: "removed" if data is None else "replaced" if path in have else "added" for path, data in patched.changed.items()}


def metadata(patched: Patched, data: bytes) -> bytes:
    """METADATA with the new version."""
    head, blank, body = data.partition(b"\n\n")
    head, count = re.subn(rb"(?m)^Version: .*$", f"Version: {patched.version}".encode(), head)
    if count != 1:
        raise Refused("METADATA of the official wheel has no single Version field", "fetch the wheel again")
    return head + blank + body


def wheel_name(patched: Patched) -> str:
    return patched.official.name.replace(f"vllm-{patched.base.version}-", f"vllm-{patched.version}-", 1)


def write(patched: Patched, folder: pathlib.Path, ui: Ui) -> tuple[pathlib.Path, dict[str, str]]:
    """Write the patched wheel into `folder`, in one step, and check every member against RECORD; return (path, kinds of change)."""
    target = folder / wheel_name(patched)
    files.check_writable(folder)
    needed, free = patched.official.stat().st_size + _ROOM, shutil.disk_usage(folder).free
    if free < needed:
        raise Refused(f"the wheel needs {needed >> 20} MiB in {folder}, free are {free >> 20} MiB", "make room, or choose another --out; nothing was written")
    with files.locked(folder, ui.note), wheelfile.new_file(target) as scratch:
        writer = wheelfile.Writer(scratch, patched.dist_info)
        try:
            with wheelfile.opened(patched.official) as archive:
                kinds = _fill(writer, patched, archive, ui)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        wheelfile.check_record(scratch, lambda done, total: ui.progress("checking the new wheel", done, total))
    return target, kinds


def _fill(writer: wheelfile.Writer, patched: Patched, archive: zipfile.ZipFile, ui: Ui) -> dict[str, str]:
    members = archive.infolist()
    kinds = kinds_of_change(patched, archive.namelist())
    old_info = f"vllm-{patched.base.version}.dist-info"
    record = wheelfile.parse_record(archive.read(f"{old_info}/RECORD"))
    for number, member in enumerate(members):
        ui.progress("writing the wheel", number, len(members))
        path = member.filename
        if path.startswith(patched.old_prefix) or member.is_dir():
            continue  # the dist-info comes last
        if path not in patched.changed:
            writer.keep(archive, member, record[path])
        elif (data := patched.changed[path]) is not None:
            writer.add(path, data, (member.external_attr >> 16) & 0o777 or 0o644)
    for path in sorted(p for p, kind in kinds.items() if kind == "added"):
        writer.add(path, patched.changed[path])
    for member in members:
        path = member.filename
        if not path.startswith(patched.old_prefix) or member.is_dir() or path == f"{old_info}/RECORD":
            continue
        data = archive.read(member)
        writer.add(patched.renamed(path), metadata(patched, data) if path == f"{old_info}/METADATA" else data, (member.external_attr >> 16) & 0o777 or 0o644)
    writer.add(f"{patched.dist_info}/{PROVENANCE}", provenance(patched, kinds))
    ui.progress("writing the wheel", len(members), len(members))
    return kinds
