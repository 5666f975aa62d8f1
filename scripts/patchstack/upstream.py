# SPDX-License-Identifier: Apache-2.0
"""Get the pinned upstream tree into the cache as a git repository.

Sources: the sdist from a package index through the user's own pip (its index, proxy, certificates, cache), a git
repository (URL or local clone), an sdist file, a plain directory. An sdist is the tagged tree plus generated files; it is
imported without ever being unpacked on disk, as one commit that depends on its content alone.
"""
import contextlib
import os
import pathlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from . import files
from .downloads import pip_download, sha256
from .errors import GitError, Refused, Unavailable, Usage
from .git import Git
from .patchfile import unsafe_path
from .pins import Base
from .report import Ui

_DATE = "0 +0000"
_VERSION_FILE = "vllm/_version.py"
# Written into the sdist by the build, not part of the tagged tree.
_GENERATED = ("PKG-INFO", "setup.cfg", "vllm.egg-info/", _VERSION_FILE)

# pip insists on metadata, and the real build backend would need torch to make it. This stand-in hands over the PKG-INFO
# that the sdist carries, so that nothing of the sdist is ever run.
_METADATA_BACKEND = '''\
import email, os, shutil

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    with open("PKG-INFO", encoding="utf-8") as f:
        info = email.message_from_file(f)
    name = f"{info['Name']}-{info['Version']}.dist-info"
    os.makedirs(os.path.join(directory, name))
    shutil.copy("PKG-INFO", os.path.join(directory, name, "METADATA"))
    return name
'''


@dataclass(frozen=True)
class Upstream:
    """`git_dir`: a bare repository that has `commit`. `kind`: sdist, git or directory."""

    git_dir: pathlib.Path
    commit: str
    kind: str
    version_file: bytes | None


def cache_root() -> pathlib.Path:
    """$VLLM_STACK_CACHE, or vllm-dcp-stack under the user's cache folder."""
    if own := os.environ.get("VLLM_STACK_CACHE"):
        return pathlib.Path(own).expanduser().resolve()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-dcp-stack"


def fetch(base: Base, source: str, ui: Ui) -> Upstream:
    """The pinned tree of `base`. `source`: auto, pypi, git, a URL, or a path (clone, sdist file, plain directory).

    Raises Unavailable when upstream cannot be reached and is not cached, Refused when what was found is not the pin.
    """
    cache = cache_root()
    files.check_writable(cache)
    with files.locked(cache, ui.note):
        _clear_stale(cache)
        if source == "auto":
            return _auto(base, cache, ui)
        if source == "pypi":
            return _from_index(base, cache, ui)
        if source == "git":
            return _from_git(base, os.environ.get("VLLM_REPO") or base.repository, cache, ui)
        if "://" in source or source.startswith("git@"):
            return _from_git(base, source, cache, ui)
        path = pathlib.Path(source).expanduser().resolve()
        if path.is_file():
            return _from_sdist_file(base, path, cache, ui)
        if (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir()):
            return _from_git(base, str(path), cache, ui)
        if path.is_dir():
            return _from_directory(base, path, cache, ui)
        raise Usage(f"--source {source!r} is none of auto, pypi, git, a URL, or an existing path")


def downloaded(base: Base) -> pathlib.Path | None:
    """The sdist that the cache keeps, None if it has none."""
    path = _download_path(base, cache_root())
    return path if path.is_file() else None


def _download_path(base: Base, cache: pathlib.Path) -> pathlib.Path:
    return cache / "downloads" / f"vllm-{base.version}.tar.gz"


def cached(base: Base, ui: Ui) -> Upstream | None:
    """What the cache has of `base`, fetching nothing."""
    cache = cache_root()
    if not cache.is_dir():
        return None
    with files.locked(cache, ui.note):
        return _cached(base, cache, "sdist", ui) or _cached(base, cache, "git", ui)


def import_directory(base: Base, path: pathlib.Path, ui: Ui) -> Upstream:
    """A directory as it is now, as one commit; it is removed from the cache by a later run."""
    cache = cache_root()
    files.check_writable(cache)
    with files.locked(cache, ui.note):
        return _from_directory(base, path, cache, ui)


def _clear_stale(cache: pathlib.Path) -> None:
    """Remove what killed runs left in the cache, and the imported directories of runs that have ended. Hold the cache's lock."""
    for stale in (*(cache / "bases").glob(".import-*"), *(cache / "downloads").glob(".download-*")):
        shutil.rmtree(stale, ignore_errors=True)
    for stale in (cache / "bases").glob(".directory-*.git"):
        if not pathlib.Path("/proc", stale.name.split("-")[1].removesuffix(".git")).exists():
            shutil.rmtree(stale, ignore_errors=True)


def _auto(base: Base, cache: pathlib.Path, ui: Ui) -> Upstream:
    """$VLLM_REPO if set; else the cache; else the package index; else the pin's public repository."""
    if repository := os.environ.get("VLLM_REPO"):
        return fetch_git_or_path(base, repository, cache, ui)
    for kind in ("sdist", "git"):
        if found := _cached(base, cache, kind, ui):
            return found
    reasons = []
    for step in (lambda: _from_index(base, cache, ui), lambda: _from_git(base, base.repository, cache, ui)):
        try:
            return step()
        except Unavailable as e:
            reasons.append(e.message)
    raise Unavailable(
        f"vLLM {base.tag} is not in the cache ({cache}) and cannot be fetched:\n" + "\n".join(f"- {r}" for r in reasons),
        f"connect once, or give --source the path of a clone or of vllm-{base.version}.tar.gz",
    )


def fetch_git_or_path(base: Base, repository: str, cache: pathlib.Path, ui: Ui) -> Upstream:
    """$VLLM_REPO may be a URL or the path of a clone or directory."""
    path = pathlib.Path(repository).expanduser()
    if path.is_dir() and not (path / ".git").exists() and not (path / "HEAD").is_file():
        return _from_directory(base, path.resolve(), cache, ui)
    return _from_git(base, str(path.resolve()) if path.exists() else repository, cache, ui)


# ---- the cache: one bare repository per base and kind of source, complete or absent


def _repository(base: Base, cache: pathlib.Path, kind: str) -> pathlib.Path:
    # The sdist's hash is part of the name: another pin never meets an old import.
    return cache / "bases" / (f"{base.tag}-sdist-{base.sdist_sha256[:12] or 'unpinned'}.git" if kind == "sdist" else f"{base.tag}-git.git")


def _cached(base: Base, cache: pathlib.Path, kind: str, ui: Ui) -> Upstream | None:
    """The cached import, or None; a damaged one is removed and counts as absent."""
    repository = _repository(base, cache, kind)
    if not repository.exists():
        return None
    git = Git(repository, git_dir=repository, log=ui.git)
    commit = git.resolve("refs/stack/base^{commit}")
    if commit is None or not _packs_whole(repository) or (kind == "git" and not base.is_commit(commit)):
        ui.note(f"the cached copy {repository} is damaged: it is removed and made again")
        shutil.rmtree(repository)
        return None
    version = git.try_run("cat-file", "blob", "refs/stack/version")
    return Upstream(repository, commit, kind, version.stdout if version.returncode == 0 else None)


def _packs_whole(repository: pathlib.Path) -> bool:
    """Whether every pack has the size it was stored with: catches a truncated copy without reading it."""
    sizes = repository / "pack-sizes"
    packs = {p.name: p.stat().st_size for p in (repository / "objects" / "pack").glob("*.pack")}
    try:
        stored = dict(line.rsplit(" ", 1) for line in sizes.read_text().splitlines())
        return bool(packs) and {k: int(v) for k, v in stored.items()} == packs and all((repository / "objects" / "pack" / p).with_suffix(".idx").exists() for p in packs)
    except (OSError, ValueError):
        return False


def _store(git: Git, build: pathlib.Path, repository: pathlib.Path) -> None:
    """Move a finished import into the cache in one step."""
    if not list((build / "objects" / "pack").glob("*.pack")):  # a small import is stored loose
        git.run("repack", "-a", "-d", "-q")
    packs = sorted((build / "objects" / "pack").glob("*.pack"))
    (build / "pack-sizes").write_text("".join(f"{p.name} {p.stat().st_size}\n" for p in packs))
    repository.parent.mkdir(parents=True, exist_ok=True)
    if repository.exists():
        shutil.rmtree(repository)
    os.rename(build, repository)


# ---- sdist


def _from_index(base: Base, cache: pathlib.Path, ui: Ui) -> Upstream:
    if found := _cached(base, cache, "sdist", ui):
        return found
    kept = _download_path(base, cache)
    if kept.exists() and base.pinned and sha256(kept) != base.sdist_sha256:
        ui.note(f"{kept} is damaged or not the pinned file: downloading it again")
        kept.unlink()
    if not kept.exists():
        _download(base, kept, ui)
    return _import_sdist(base, kept, cache, ui)


def _download(base: Base, kept: pathlib.Path, ui: Ui) -> None:
    """Fetch the pinned sdist with pip, which checks its hash."""
    ui.step(f"downloading the sdist of vLLM {base.version} with pip")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".download-") as folder:
        backend = pathlib.Path(folder) / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_METADATA_BACKEND)
        # The stand-in backend is found first.
        requirement = f"vllm=={base.version}" + (f" --hash=sha256:{base.sdist_sha256}" if base.pinned else "")
        downloaded = pip_download(f"vllm-{base.version}.tar.gz", [requirement], pathlib.Path(folder), ["--no-binary", "vllm", "--no-build-isolation"], ui, {"PYTHONPATH": str(backend.parent)})
        if len(downloaded) != 1 or (base.pinned and sha256(downloaded[0]) != base.sdist_sha256):
            raise Refused(f"pip downloaded {[p.name for p in downloaded]}, expected one file with sha256 {base.sdist_sha256}")
        os.replace(downloaded[0], kept)


def _from_sdist_file(base: Base, path: pathlib.Path, cache: pathlib.Path, ui: Ui) -> Upstream:
    actual = sha256(path)
    if actual != base.sdist_sha256:
        raise Refused(f"{path} is not the pinned sdist of {base.tag}:\n  expected sha256 {base.sdist_sha256}\n  found           {actual}", "give the right file, or --source pypi")
    return _cached(base, cache, "sdist", ui) or _import_sdist(base, path, cache, ui)


def sdist_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bool, IO[bytes]]]:
    """(path below the top folder, executable, stream) of each regular file. Raises Refused on anything that could leave the tree."""
    top = None
    for member in archive:
        path = member.name.removeprefix("./").rstrip("/")
        first, _, rest = path.partition("/")
        top = top or first
        if first != top or (why := unsafe_path(path)):
            raise Refused(f"{archive.name}: the member {member.name!r} {why if first == top else f'lies outside {top}/'}", "this is no proper sdist: fetch it again")
        if member.isdir():
            continue
        if not member.isreg():
            raise Refused(f"{archive.name}: the member {member.name!r} is a link or a device; an sdist has only files", "this is no proper sdist: fetch it again")
        yield rest, bool(member.mode & 0o111), archive.extractfile(member)


def _import_sdist(base: Base, path: pathlib.Path, cache: pathlib.Path, ui: Ui) -> Upstream:
    repository = _repository(base, cache, "sdist")
    try:
        with tarfile.open(path, "r:gz") as archive:
            return _import(base, repository, "sdist", sdist_members(archive), ui)
    except (tarfile.TarError, EOFError) as e:
        raise Refused(f"{path} cannot be read as a tar archive: {e}", "remove it and run the same command again") from None


# ---- plain directory


def _from_directory(base: Base, path: pathlib.Path, cache: pathlib.Path, ui: Ui) -> Upstream:
    """Import a directory as it is now; never cached, since it can change."""
    if not (path / "vllm" / "__init__.py").is_file():
        raise Refused(f"{path} is not a vLLM source tree: it has no vllm/__init__.py")
    scratch = cache / "bases" / f".directory-{os.getpid()}.git"
    return _import(base, scratch, "directory", _walk(path), ui)


def _walk(root: pathlib.Path) -> Iterator[tuple[str, bool, IO[bytes]]]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in (".git", "__pycache__"))
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if name.endswith(".pyc") or path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as stream:
                yield str(path.relative_to(root)), os.access(path, os.X_OK), stream


# ---- import: files -> one commit


def _import(base: Base, repository: pathlib.Path, kind: str, members: Iterator[tuple[str, bool, IO[bytes]]], ui: Ui) -> Upstream:
    """Stream the members into a new repository as one commit, and move that into the cache."""
    ui.step(f"importing vLLM {base.tag} ({kind}) into the cache")
    repository.parent.mkdir(parents=True, exist_ok=True)
    build = pathlib.Path(tempfile.mkdtemp(prefix=".import-", dir=repository.parent))
    git = Git(build, git_dir=build, log=ui.git)
    version: bytes | None = None
    try:
        git.run("init", "--bare", "--quiet", "--initial-branch=base", ".")
        with tempfile.TemporaryFile() as messages:
            importer = git.popen("fast-import", "--quiet", "--done", "--date-format=raw", "--max-pack-size=4g", stderr=messages)
            try:
                out = importer.stdin
                out.write(f"commit refs/stack/base\ncommitter vLLM <vllm@vllm-dcp-stack.invalid> {_DATE}\n".encode())
                out.write(_counted(f"vLLM {base.tag}\n".encode()))
                for path, executable, stream in members:
                    data = stream.read()
                    if path == _VERSION_FILE:
                        version = data
                    if path.startswith(_GENERATED):
                        continue
                    quoted = path if not path.startswith('"') and "\n" not in path else '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
                    out.write(f"M {'100755' if executable else '100644'} inline {quoted}\n".encode("utf-8", "surrogateescape"))
                    out.write(_counted(data))
                out.write(b"done\n")
                out.close()
            except BrokenPipeError:
                pass  # fast-import died; its message says why
            except BaseException:
                importer.kill()  # it would wait for the rest for ever
                raise
            finally:
                code = importer.wait()
                with contextlib.suppress(BrokenPipeError):
                    importer.stdin.close()
            if code:
                messages.seek(0)
                raise GitError(["git", "fast-import"], code, messages.read().decode("utf-8", "replace"))
        if version is not None:
            blob = git.text("hash-object", "-w", "--stdin", input=version)
            git.run("update-ref", "refs/stack/version", blob)
            check_version(base, version)
        commit = git.text("rev-parse", "refs/stack/base")
        _store(git, build, repository)
        return Upstream(repository, commit, kind, version)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _counted(data: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(data), data)


def check_version(base: Base, version_file: bytes) -> None:
    """An sdist names its commit in vllm/_version.py (`__commit_id__ = 'g<hex>'`): it must be the pinned one."""
    match = re.search(rb"commit_id = '?g?([0-9a-f]{7,40})'", version_file)
    if match and not base.is_commit(match[1].decode()):
        raise Refused(f"the source says it is commit {match[1].decode()}, the pin of {base.tag} is {base.commit}", "use the source of the pinned release")


# ---- git


def _from_git(base: Base, repository: str, cache: pathlib.Path, ui: Ui) -> Upstream:
    """Fetch the pinned commit at depth 1: by tag, or by the pin itself where the tag is missing."""
    target = _repository(base, cache, "git")
    ui.step(f"fetching {base.tag} from {repository}")
    target.parent.mkdir(parents=True, exist_ok=True)
    build = pathlib.Path(tempfile.mkdtemp(prefix=".import-", dir=target.parent))
    git = Git(build, git_dir=build, log=ui.git)
    try:
        git.run("init", "--bare", "--quiet", "--initial-branch=base", ".")
        local = pathlib.Path(repository)
        url = f"file://{local}" if local.is_dir() else repository
        wanted = f"refs/tags/{base.tag}"
        if local.is_dir():  # a clone may have the commit but not the tag
            clone = Git(local, log=ui.git)
            wanted = clone.resolve(f"{wanted}^{{commit}}") or clone.resolve(f"{base.commit}^{{commit}}") or wanted
        done = git.network("-c", "protocol.version=2", "fetch", "--quiet", "--no-tags", "--depth=1", url, wanted)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()
            if re.search(r"No space left on device|Disk quota exceeded|Read-only file system|failed to write", said):  # ours, not the other side
                raise GitError(["git", "fetch", url, wanted], done.returncode, said)
            raise Unavailable(f"git could not fetch {base.tag} from {repository}:\n  " + "\n  ".join(said.splitlines()[-3:]))
        commit = git.text("rev-parse", "FETCH_HEAD^{commit}")
        if not base.is_commit(commit):
            raise Refused(f"{base.tag} in {repository} is commit {commit}, the pin is {base.commit}: the tag was moved, or this is another project",
                          "use another --source, or pin the new commit in base.toml")  # fmt: skip
        if (kept := _cached(base, cache, "git", ui)) and kept.commit == commit:
            return kept  # another run may be reading it
        git.run("update-ref", "refs/stack/base", commit)
        _store(git, build, target)
        return Upstream(target, commit, "git", None)
    finally:
        shutil.rmtree(build, ignore_errors=True)
