# SPDX-License-Identifier: Apache-2.0
"""Find a release to look at or move to: pinned or not, or a path."""
import hashlib
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, replace

from . import clones, foreign
from .downloads import pip_environment, require_pip
from .errors import Unavailable, Usage
from .pins import Base, load_bases, unpinned
from .report import Ui
from .upstream import Upstream, fetch, import_directory


@dataclass(frozen=True)
class Release:
    """`name`: what reports call it. `base`: its pin, without a hash if it is not pinned yet; None for a path."""

    name: str
    version: str
    upstream: Upstream
    base: Base


def find_release(ref: str, like: Base, ui: Ui, bases: list[Base] | None = None) -> Release:
    """The release that `ref` names. Raises Usage, Unavailable or Refused."""
    path = pathlib.Path(ref).expanduser()
    if "/" in ref or (path.exists() and ref != "latest" and not re.fullmatch(r"v?\d+\.\d+.*", ref)):
        if not path.exists():
            raise Usage(f"{ref}: no such path")
        base = Base(path.name, "0", "", "", like.repository, False, like.overlay, like.folder.parent / path.name, like.overlay_root)
        if path.is_file():
            base = replace(base, sdist_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        elif head := _head(path, ui):
            base = replace(base, tag=f"{path.name}-{head[:12]}", commit=head)
        upstream = import_directory(base, path.resolve(), ui) if path.is_dir() and not base.commit else fetch(base, str(path), ui)
        version = _version_in(upstream) or "0"
        return Release(path.name, version, upstream, base)
    if ref == "latest":
        ref = newest()
    pinned = next((b for b in (bases or load_bases()) if ref in (b.tag, b.version) or b.is_commit(ref)), None)
    base = pinned or unpinned(ref, like)
    return Release(base.tag, base.version, fetch(base, "auto", ui), base)


def _head(path: pathlib.Path, ui: Ui) -> str | None:
    """The commit that a clone or bare repository is at; None for another directory."""
    place = clones.find(path)
    if place is None:
        return None
    with foreign.opened(place, ui.git) as git:
        return git.resolve("HEAD^{commit}")


def _version_in(upstream: Upstream) -> str | None:
    match = re.search(rb"version = '([^']+)'", upstream.version_file or b"")
    return match[1].decode() if match else None


def newest() -> str:
    """The newest release that the user's package index has."""
    require_pip()
    done = subprocess.run([sys.executable, "-P", "-m", "pip", "index", "versions", "vllm", "--disable-pip-version-check"], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=pip_environment())
    match = re.search(r"^vllm \(([\w.]+)\)", done.stdout, re.MULTILINE)
    if done.returncode or not match:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise Unavailable(f"the package index does not say which release of vLLM is newest: {said}", "name the release with --ref")
    return f"v{match[1]}"
