# SPDX-License-Identifier: Apache-2.0
"""Run apply.py and SIGKILL it before its n-th step: `python killer.py N PROJECT ARGS...`; N = 0 prints the steps instead.

A step is anything that can change a file: a git command that writes, and the file-system calls of the tool. A kill between
two reads looks like one before the next write, so reads are not counted. A negative N kills in the middle of step -N where
that step is a program: it is started, and both are killed a moment later.
"""
import collections
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

WRITES = {"init", "update-ref", "config", "symbolic-ref", "reset", "read-tree", "apply", "write-tree", "commit-tree", "hash-object", "update-index", "repack", "fast-import", "fetch"}
SCRATCH = {"write-tree", "commit-tree", "hash-object", "apply", "update-index"}
count = 0
seen: collections.Counter[str] = collections.Counter()
inside: collections.Counter[str] = collections.Counter()
wanted = int(sys.argv[1])


def step(name: str, scratch: bool = False) -> None:
    """`scratch`: it writes in a temporary place only; the first two of each kind stand for all."""
    global count
    seen[name.split(" ")[0:2][-1]] += 1
    if scratch and seen[name.split(" ")[0:2][-1]] > 2:
        return
    count += 1
    if wanted == 0:
        print(f"STEP {name}", file=sys.stderr)
    if count == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def counted(owner, name: str) -> None:
    original = getattr(owner, name)

    def call(*args, **kwargs):
        inner = name == "copytree" and inside[name] or name in ("copy2", "mkdir")  # one for each object of a repository
        temporary = name == "mkdtemp" and not kwargs.get("dir") or name == "rmtree" and str(args[0]).startswith(tempfile.gettempdir() + "/")
        step(name, bool(inner or temporary))
        inside[name] += 1
        try:
            return original(*args, **kwargs)
        finally:
            inside[name] -= 1

    setattr(owner, name, call)


class Popen(subprocess.Popen):
    def __init__(self, argv, *args, **kwargs):
        writes = argv[0] != "git" or WRITES & set(argv)
        if writes:
            shown = [a for a in argv if "=" not in a and a != "-c"]
            step(" ".join(shown)[:60], scratch=argv[0] == "git" and (shown[1] in SCRATCH or shown[1:2] == ["read-tree"] and "-m" not in shown))
        super().__init__(argv, *args, **kwargs)
        if writes and count == -wanted:
            time.sleep(0.002)
            self.send_signal(signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    project = pathlib.Path(sys.argv[2])
    sys.argv = [str(project / "apply.py"), *sys.argv[3:]]
    sys.path.insert(0, str(project / "scripts"))
    from patchstack import files
    from patchstack.cli import main

    subprocess.Popen = Popen
    for owner, names in ((os, ("rename", "replace", "chdir")), (files, ("exchange",)), (shutil, ("copytree", "copy2", "rmtree")), (tempfile, ("mkdtemp", "mkstemp")),
                         (pathlib.Path, ("write_bytes", "write_text", "unlink", "mkdir"))):  # fmt: skip
        for name in names:
            counted(owner, name)
    code = main()
    step("the end")
    sys.exit(code)
