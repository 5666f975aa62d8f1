# SPDX-License-Identifier: Apache-2.0
"""Fetch files with the user's own pip: its index, proxy, certificates and cache apply, and it checks the hashes of pinned ones."""
import hashlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .errors import Refused, Unavailable
from .report import Ui


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def pip_download(what: str, requirements: Sequence[str], folder: pathlib.Path, options: Sequence[str], ui: Ui, env: Mapping[str, str] | None = None) -> list[pathlib.Path]:
    """`pip download` the requirement lines, checked where each has a --hash, into the empty directory `folder`; return the files.

    Raises Refused when a file has another hash or there is no room, Unavailable when the index cannot be reached or has no
    such file. `what` names the thing in these messages.
    """
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in requirements))
    into = folder / "files"
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", *options, *(["--require-hashes"] if all("--hash=" in line for line in requirements) else []),
               "--progress-bar", "on" if ui.err.isatty() else "off", "--dest", str(into), "--requirement", str(listed)]  # fmt: skip
    if ui.verbose:
        ui.git(" ".join(command))
    # HOME, PIP_* and the proxy variables stay the user's.
    done = subprocess.run(command, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL if not ui.err.isatty() else ui.err.fileno(), stderr=subprocess.PIPE, text=True)  # fmt: skip
    if done.returncode:
        said = done.stderr.strip()
        if "THESE PACKAGES DO NOT MATCH THE HASHES" in said:
            raise Refused(f"the index serves other files than the pinned ones for {what}:\n{said}", "do not use that index, or, if the release was really replaced, pin it anew in patches/")
        if "No space left on device" in said or "Read-only file system" in said:
            raise Refused(f"pip cannot write {what}: {said.splitlines()[-1]}", "make room, or set VLLM_STACK_CACHE to another folder")
        last = "\n  ".join(said.splitlines()[-3:]) or f"exit code {done.returncode}"
        raise Unavailable(f"pip could not download {what}:\n  {last}", "connect once, or see with -v what pip was asked for")
    return sorted(into.iterdir())
