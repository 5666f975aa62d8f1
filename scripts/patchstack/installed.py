# SPDX-License-Identifier: Apache-2.0
"""A vLLM that pip installed: recognised by its dist-info, and a patched one by the provenance that its wheel brought."""
import json
import pathlib
from dataclasses import dataclass, replace

from .disk import EXECUTABLE, FILE, Disk
from .lock import Lock

PROVENANCE = "dcp_stack.json"  # in the dist-info of a patched wheel


@dataclass(frozen=True)
class Package:
    """`tag`, `patchset`: what the provenance says; None of an official wheel, or where it is damaged."""

    dist_info: pathlib.Path
    tag: str | None
    patchset: str | None


def find(site: pathlib.Path) -> Package | None:
    """The vLLM installed in `site` (a site-packages folder); None if there is none, or more than one."""
    found = [path for path in site.glob("vllm-*.dist-info") if (path / "METADATA").is_file()]
    if len(found) != 1:
        return None
    try:
        told = json.loads((found[0] / PROVENANCE).read_text(encoding="utf-8"))
        return Package(found[0], str(told["base"]["tag"]), str(told["patchset"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Package(found[0], None, None)


def part(lock: Lock) -> Lock:
    """What of a lock an installed package can show: the files below vllm/."""
    return replace(lock, touched={path: blobs for path, blobs in lock.touched.items() if path.startswith("vllm/")})


def blobs(site: pathlib.Path, lock: Lock) -> dict[str, str]:
    """`path -> "<mode> <blob id>"` of the files of `lock` that are there; the mode is the locked one where only that would differ."""
    found = {}
    for path, blob in Disk(site).blobs(lock.touched).items():
        if blob and blob.split(" ")[0] in (FILE, EXECUTABLE):
            wanted = next((known for known in lock.touched[path] if known and known.split(" ")[1] == blob.split(" ")[1]), None)
            found[path] = wanted or blob
    return found
