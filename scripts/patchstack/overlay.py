# SPDX-License-Identifier: Apache-2.0
"""vllm_overlay/: whole new files, laid over the patched tree at the same path."""
import hashlib
import pathlib

from .errors import Refused, Usage
from .patchfile import unsafe_path
from .pins import Base


def blob_id(data: bytes) -> str:
    """git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def overlay_files(base: Base) -> dict[str, bytes]:
    """`path in the tree -> content` of the overlay files that `base` takes. Raises Usage or Refused on a bad entry."""
    files = {}
    for path in base.overlay:
        if why := unsafe_path(path):
            raise Refused(f"{base.folder / 'base.toml'}: the overlay path {path!r} {why}")
        source = base.overlay_root / path
        if source.is_symlink() or not source.is_file():
            raise Usage(f"{base.folder / 'base.toml'} lists {path}, but {source} is not a regular file")
        files[path] = source.read_bytes()
    return files


def list_overlay(root: pathlib.Path) -> list[str]:
    """Every file under vllm_overlay/, as paths in the tree."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
