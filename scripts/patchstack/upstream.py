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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import cache, clones, foreign, sdist, workspace
from .committer import quoted
from .downloads import pip_download, sha256, standing_in
from .errors import GitError, Refused, Unavailable, Usage, fatal_first
from .files import check_writable, locked
from .git import Git
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


def fetch(base: Base, source: str, ui: Ui) -> Upstream:
    """The pinned tree of `base`. `source`: auto, pypi, git, a URL, or a path (clone, sdist file, plain directory).

    Raises Unavailable when upstream cannot be reached and is not cached, Refused when what was found is not the pin.
    """
    if source in ("auto", "pypi", "git") or "://" in source or source.startswith("git@"):
        with _open_cache(ui):
            if source == "auto":
                return _auto(base, ui)
            if source == "pypi":
                return _from_index(base, ui)
            return _from_git(base, (os.environ.get("VLLM_REPO") or base.repository) if source == "git" else source, ui)
    path = pathlib.Path(source).expanduser().resolve()
    if not path.exists():
        raise Usage(f"--source {source!r} is none of auto, pypi, git, a URL, or an existing path")
    return _from_path(base, path, ui)


def _from_path(base: Base, path: pathlib.Path, ui: Ui) -> Upstream:
    if path.is_file():
        with _open_cache(ui):
            return _from_sdist_file(base, path, ui)
    if place := clones.find(path):
        with _open_cache(ui):
            return _from_clone(base, place, ui)
    return import_directory(base, path, ui)


@contextlib.contextmanager
def _open_cache(ui: Ui) -> Iterator[None]:
    """Hold the cache against other runs. It may be read-only as long as nothing has to be put into it."""
    folder = cache.root()
    if not folder.is_dir():
        check_writable(folder, cache.SET_ELSEWHERE)
    with locked(folder, ui.note):
        yield


def downloaded(base: Base) -> pathlib.Path | None:
    """The sdist that the cache keeps, None if it has none."""
    path = _download_path(base)
    return path if path.is_file() else None


def _download_path(base: Base) -> pathlib.Path:
    return cache.downloads() / f"vllm-{base.version}.tar.gz"


def cached(base: Base, ui: Ui) -> Upstream | None:
    """What the cache has of `base`, fetching nothing."""
    if not cache.root().is_dir():
        return None
    with _open_cache(ui):
        return _cached(base, "sdist", ui) or _cached(base, "git", ui)


def _auto(base: Base, ui: Ui) -> Upstream:
    """$VLLM_REPO if set; else the cache; else the package index; else the pin's public repository."""
    if repository := os.environ.get("VLLM_REPO"):
        return _from_git(base, repository, ui)
    for kind in ("sdist", "git"):
        if found := _cached(base, kind, ui):
            return found
    reasons = []
    for step in (lambda: _from_index(base, ui), lambda: _from_git(base, base.repository, ui)):
        try:
            return step()
        except Unavailable as e:
            reasons.append(e.message)
    raise Unavailable(
        f"vLLM {base.tag} is not in the cache ({cache.root()}) and cannot be fetched:\n" + "\n".join(f"- {r}" for r in reasons),
        f"connect once, or give --source the path of a clone or of vllm-{base.version}.tar.gz",
    )


def _cached(base: Base, kind: str, ui: Ui) -> Upstream | None:
    """The cached import, read whole and compared with what was stored; None if there is none, or a damaged one."""
    repository = cache.repository_of(base, kind)
    if not repository.exists():
        return None
    git = Git(repository, git_dir=repository, log=ui.git)
    commit = git.resolve(f"{cache.BASE}^{{commit}}")
    if commit is None or not cache.is_whole(repository) or (kind == "git" and not base.is_commit(commit)):
        ui.note(f"the cached copy {repository} is damaged, or was made by another version of this tool: it counts as absent")
        return None
    version = git.try_run("cat-file", "blob", cache.VERSION)
    return Upstream(repository, commit, kind, version.stdout if version.returncode == 0 else None)


@contextlib.contextmanager
def _new_import(repository: pathlib.Path, ui: Ui) -> Iterator[Git]:
    """A new bare repository on the file system of the cache, to be stored; what killed runs left goes."""
    check_writable(repository.parent, cache.SET_ELSEWHERE)
    with workspace.scratch(repository.parent, ".import-") as folder:
        build = folder / "repository.git"
        build.mkdir()
        git = Git(build, git_dir=build, log=ui.git)
        git.run("init", "--bare", "--quiet", "--initial-branch=base", ".")
        yield git


# ---- sdist


def _from_index(base: Base, ui: Ui) -> Upstream:
    if found := _cached(base, "sdist", ui):
        return found
    kept = _download_path(base)
    check_writable(kept.parent, cache.SET_ELSEWHERE)
    if kept.exists() and base.pinned and sha256(kept) != base.sdist_sha256:
        ui.note(f"{kept} is damaged or not the pinned file: downloading it again")
        kept.unlink()
    if not kept.exists():
        _download(base, kept, ui)
    return _import_sdist(base, kept, ui)


def _download(base: Base, kept: pathlib.Path, ui: Ui) -> None:
    """Fetch the pinned sdist with pip, which checks its hash."""
    ui.step(f"downloading the sdist of vLLM {base.version} with pip")
    with workspace.scratch(kept.parent, cache.DOWNLOADING) as folder, standing_in("setuptools", {"__init__.py": "", "build_meta.py": _METADATA_BACKEND}) as backend:
        requirement = f"vllm=={base.version}" + (f" --hash=sha256:{base.sdist_sha256}" if base.pinned else "")
        # The stand-in backend is found first.
        downloaded = pip_download(f"vllm-{base.version}.tar.gz", [requirement], folder, ["--no-binary", "vllm", "--no-build-isolation"], ui, {"PYTHONPATH": str(backend)})
        if len(downloaded) != 1 or (base.pinned and sha256(downloaded[0]) != base.sdist_sha256):
            raise Refused(f"pip downloaded {[p.name for p in downloaded]}, expected one file with sha256 {base.sdist_sha256}")
        os.replace(downloaded[0], kept)


def _from_sdist_file(base: Base, path: pathlib.Path, ui: Ui) -> Upstream:
    actual = sha256(path)
    if actual != base.sdist_sha256:
        raise Refused(f"{path} is not the pinned sdist of {base.tag}:\n  expected sha256 {base.sdist_sha256}\n  found           {actual}", "give the right file, or --source pypi")
    return _cached(base, "sdist", ui) or _import_sdist(base, path, ui)


def _import_sdist(base: Base, path: pathlib.Path, ui: Ui) -> Upstream:
    repository = cache.repository_of(base, "sdist")
    with _new_import(repository, ui) as git, sdist.opened(path) as members:
        commit, version = _import(git, base, "sdist", members, ui)
        cache.store(git.git_dir, repository)
    return Upstream(repository, commit, "sdist", version)


# ---- plain directory


def import_directory(base: Base, path: pathlib.Path, ui: Ui) -> Upstream:
    """A directory as it is now, as one commit; never cached, since it can change: it is there until this run ends."""
    if not (path / "vllm" / "__init__.py").is_file():
        raise Refused(f"{path} is not a vLLM source tree: it has no vllm/__init__.py")
    build = workspace.until_the_end()
    git = Git(build, git_dir=build, log=ui.git)
    git.run("init", "--bare", "--quiet", "--initial-branch=base", ".")
    commit, version = _import(git, base, "directory", _walk(path), ui)
    return Upstream(build, commit, "directory", version)


def _walk(root: pathlib.Path) -> Iterator[tuple[str, bool, bytes]]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in (".git", "__pycache__"))
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if name.endswith(".pyc") or path.is_symlink() or not path.is_file():
                continue
            yield str(path.relative_to(root)), os.access(path, os.X_OK), path.read_bytes()


# ---- import: files -> one commit


def _import(git: Git, base: Base, kind: str, members: Iterable[tuple[str, bool, bytes]], ui: Ui) -> tuple[str, bytes | None]:
    """Stream the members into the new repository `git` as one commit, and seal it; return (commit, content of vllm/_version.py)."""
    ui.step(f"importing vLLM {base.tag} ({kind})")
    version: bytes | None = None
    with workspace.temporary_file() as messages:
        importer = git.popen("fast-import", "--quiet", "--done", "--date-format=raw", "--max-pack-size=4g", stderr=messages)
        try:
            out = importer.stdin
            out.write(f"commit {cache.BASE}\ncommitter vLLM <vllm@vllm-dcp-stack.invalid> {_DATE}\n".encode())
            out.write(_counted(f"vLLM {base.tag}\n".encode()))
            for path, executable, data in members:
                if path == _VERSION_FILE:
                    version = data
                if not path.startswith(_GENERATED):
                    out.write(b"M %b inline %b\n" % (b"100755" if executable else b"100644", quoted(path)))
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
        git.run("update-ref", cache.VERSION, git.text("hash-object", "-w", "--stdin", input=version))
        check_version(base, version)
    cache.seal(git)
    return git.text("rev-parse", cache.BASE), version


def _counted(data: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(data), data)


def check_version(base: Base, version_file: bytes) -> None:
    """An sdist names its commit in vllm/_version.py (`__commit_id__ = 'g<hex>'`): it must be the pinned one."""
    match = re.search(rb"commit_id = '?g?([0-9a-f]{7,40})'", version_file)
    if match and not base.is_commit(match[1].decode()):
        raise Refused(f"the source says it is commit {match[1].decode()}, the pin of {base.tag} is {base.commit}", "use the source of the pinned release")


# ---- git


def _from_git(base: Base, repository: str, ui: Ui) -> Upstream:
    """A URL, or what $VLLM_REPO names: that may be the path of a clone or of a plain directory too."""
    path = pathlib.Path(repository).expanduser()
    if path.exists():
        path = path.resolve()
        place = clones.find(path)
        return _from_clone(base, place, ui) if place else import_directory(base, path, ui)
    with _new_import(cache.repository_of(base, "git"), ui) as git:
        ui.step(f"fetching {base.tag} from {repository}")
        wanted = f"refs/tags/{base.tag}"
        done = git.network("-c", "protocol.version=2", "fetch", "--quiet", "--no-tags", "--depth=1", repository, wanted)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()
            if re.search(r"No space left on device|Disk quota exceeded|Read-only file system|failed to write", said):  # ours, not the other side
                raise GitError(["git", "fetch", repository, wanted], done.returncode, said)
            raise Unavailable(f"git could not fetch {base.tag} from {repository}:\n  " + "\n  ".join(fatal_first(said)))
        return _keep(git, base, git.text("rev-parse", "FETCH_HEAD^{commit}"), repository, ui)


def _from_clone(base: Base, place: foreign.Place, ui: Ui) -> Upstream:
    """The pinned commit of a repository on this machine, read without running anything of it: by tag, or by the pin where the tag is missing."""
    with _new_import(cache.repository_of(base, "git"), ui) as git:
        ui.step(f"reading {base.tag} from {place.top}")
        commit = clones.find_commit(place, base, ui)
        _refuse_moved(base, commit, str(place.top))
        clones.copy_commit(place, commit, git, ui)
        return _keep(git, base, commit, str(place.top), ui)


def _keep(git: Git, base: Base, commit: str, where: str, ui: Ui) -> Upstream:
    _refuse_moved(base, commit, where)
    repository = cache.repository_of(base, "git")
    if not ((kept := _cached(base, "git", ui)) and kept.commit == commit):  # another run may be reading that
        git.run("update-ref", cache.BASE, commit)
        cache.seal(git)
        if repository.exists():
            shutil.rmtree(repository)
        cache.store(git.git_dir, repository)
    return Upstream(repository, commit, "git", None)


def _refuse_moved(base: Base, commit: str, where: str) -> None:
    if not base.is_commit(commit):
        raise Refused(f"{base.tag} in {where} is commit {commit}, the pin is {base.commit}: the tag was moved, or this is another project",
                      "use another --source, or pin the new commit in base.toml")  # fmt: skip
