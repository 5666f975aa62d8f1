# SPDX-License-Identifier: Apache-2.0
"""Run apply.py and SIGKILL it at its n-th step: `python killer.py N HOW PROJECT ARGS...`; N = 0 prints the steps instead.

A step is anything that can change a file: a program that writes, and the file-system calls of the tool. A kill between two
reads looks like one before the next write, so reads are not counted. HOW, where the step is a call: `before` or `after` it.
Where it is a program also `during` (it is started, and it and the tool are killed a moment later) and `orphan` (the tool alone
is, and the program goes on). `before` and `after` kill the process group, in which there may be a program that waits for input.
With MEDDLE in the environment that command is run at the step instead, and nothing is killed.
"""
import collections
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

WRITES = {"init", "update-ref", "config", "symbolic-ref", "reset", "read-tree", "apply", "write-tree", "hash-object", "update-index", "repack", "fast-import", "fetch", "index-pack"}
SCRATCH = {"write-tree", "hash-object", "apply", "read-tree"}
CALLS = {os: ("rename", "replace", "link", "unlink", "rmdir", "mkdir", "chmod", "fchmod", "chown", "fchown", "fsync", "open", "symlink"), shutil: ("copyfile", "copy2", "copytree", "rmtree"), tempfile: ("mkdtemp", "mkstemp"),
         pathlib.Path: ("write_bytes", "write_text", "unlink", "mkdir", "symlink_to")}  # fmt: skip
OFTEN = {"fsync", "open", "mkdir", "chmod", "fchmod", "mkdtemp", "write_text", "write_bytes", "symlink_to", "symlink", "copyfile"}
TEMPORARY = os.environ.get("TMPDIR", "/nowhere") + "/"
count = 0
seen: collections.Counter[str] = collections.Counter()
counting = threading.Lock()  # the tool writes some files side by side
inside = threading.local()
wanted, how = int(sys.argv[1]), sys.argv[2]


def kill() -> None:
    if command := os.environ.get("MEDDLE"):  # no kill: somebody else does something at that moment
        os.waitpid(os.posix_spawnp("sh", ["sh", "-c", command], os.environ), 0)
    else:
        os.killpg(os.getpgid(0), signal.SIGKILL)


def step(name: str, often: bool) -> bool:
    """Whether this is the wanted step; kills `before` it. `often`: the first three of its kind stand for all."""
    global count
    with counting:
        seen[name] += 1
        if often and seen[name] > 3:
            return False
        count += 1
        here = count == wanted
        if wanted == 0:
            print(f"STEP {name}", file=sys.stderr)
    if here and how == "before":
        kill()
    return here


def counted(owner, name: str) -> None:
    original = getattr(owner, name)

    def call(*args, **kwargs):
        depth = getattr(inside, "depth", 0)
        reads = name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT)
        if depth or reads:  # what a call does inside is no step of its own
            return original(*args, **kwargs)
        often = name in OFTEN or str(args[0] if args else "").startswith(TEMPORARY)
        here = step(f"{name}{' of a temporary file' if often and name not in OFTEN else ''}", often)
        inside.depth = depth + (owner is not os)
        try:
            return original(*args, **kwargs)
        finally:
            inside.depth = depth
            if here and how == "after":
                kill()

    setattr(owner, name, call)


class Popen(subprocess.Popen):
    def __init__(self, argv, *args, **kwargs):
        words = [os.path.basename(argv[0]), *(a for a in argv[1:] if "=" not in a and a != "-c")]
        writes = argv[0] != "git" or bool(WRITES & set(words)) and "--list" not in words
        here = writes and step("program " + " ".join(words)[:40], argv[0] == "git" and words[1] in SCRATCH)
        super().__init__(argv, *args, **kwargs)
        if here and how in ("during", "orphan"):
            time.sleep(0.002)
            if how == "orphan":
                os.kill(os.getpid(), signal.SIGKILL)
            kill()


if __name__ == "__main__":
    project = pathlib.Path(sys.argv[3])
    sys.argv = [str(project / "apply.py"), *sys.argv[4:]]
    sys.path.insert(0, str(project / "scripts"))
    from patchstack.cli import main

    subprocess.Popen = Popen
    for owner, names in CALLS.items():
        for name in names:
            counted(owner, name)
    code = main()
    step("the end", False)
    sys.exit(code)
