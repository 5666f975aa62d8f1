# SPDX-License-Identifier: Apache-2.0
"""Fetch files with the user's own pip: its index, proxy, certificates and cache apply, and it checks the hashes of pinned ones."""
import contextlib
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from . import workspace
from .errors import Refused, Unavailable
from .report import Ui


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def pip_environment() -> dict[str, str]:
    """The user's environment, so that HOME, PIP_* and the proxy variables apply; but a download is no installation.

    What they demand of those (a virtual environment, version constraints, more requirements) would only stop it: every file is pinned.
    """
    return {k: v for k, v in os.environ.items() if k != "PIP_REQUIREMENT"} | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_CONSTRAINT": os.devnull}


def require_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(f"this Python has no pip ({sys.executable} -m pip)", "install it (python3 -m ensurepip, or the package python3-pip), or run apply.py by a Python that has it; or give --source a clone or an sdist")


@contextlib.contextmanager
def standing_in(package: str, modules: Mapping[str, str]) -> Iterator[pathlib.Path]:
    """A folder for PYTHONPATH with a stand-in `package`. PYTHONPATH separates by colons, so its path has none."""
    places = [p for p in (str(workspace.temporary_root()), "/tmp", "/var/tmp", "/dev/shm") if os.pathsep not in p and os.path.isdir(p) and os.access(p, os.W_OK)]
    if not places:
        raise Refused(f"no folder for temporary files without {os.pathsep!r} in its path", "set TMPDIR to one")
    with workspace.scratch(pathlib.Path(places[0]), "patchstack-") as folder:
        (folder / package).mkdir()
        for name, text in modules.items():
            (folder / package / name).write_text(text)
        yield folder


def pip_download(what: str, requirements: Sequence[str], folder: pathlib.Path, options: Sequence[str], ui: Ui, env: Mapping[str, str] | None = None) -> list[pathlib.Path]:
    """`pip download` the requirement lines, checked where each has a --hash, into the empty directory `folder`; return the files.

    Raises Refused when a file has another hash or there is no room, Unavailable when the index cannot be reached or has no
    such file. `what` names the thing in these messages.
    """
    require_pip()
    # -P: not a module named pip that lies where the user stands.
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in requirements))
    into = folder / "files"
    into.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", *options, *(["--require-hashes"] if all("--hash=" in line for line in requirements) else []),
               "--progress-bar", "on" if ui.err.isatty() else "off", "--dest", str(into), "--requirement", str(listed)]  # fmt: skip
    if ui.verbose:
        ui.git(" ".join(command))
    done = subprocess.run(command, env=pip_environment() | dict(env or {}), stdin=subprocess.DEVNULL,
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
