# SPDX-License-Identifier: Apache-2.0
"""A small repository with upstream's real history of only the paths that the stack touches.

git-filter-repo rewrites a throw-away copy; blob ids stay what they are, so the patches' index lines resolve in it and 3-way,
blame and `log -L` work offline. filter-repo/commit-map keeps the upstream name of every commit.
"""
import importlib.util
import os
import pathlib
import subprocess
import sys

from . import clones, files, foreign, stack, workspace
from .errors import GitError, Refused, Usage
from .git import Git
from .pins import Base
from .report import Ui


def paths_of(bases: list[Base]) -> list[str]:
    """Every path that the stack touches on any base, without what only the overlay has."""
    return sorted({p for b in bases for p in stack.touched_paths(stack.read_stack(b)) if p not in b.overlay})


def carve(clone: pathlib.Path, out: pathlib.Path, bases: list[Base], ui: Ui) -> dict[str, int]:
    """Make `out` from `clone`; return the numbers of commits before and after, and of paths. `clone` is only read."""
    if importlib.util.find_spec("git_filter_repo") is None:
        raise Usage("git-filter-repo is not installed", f"{sys.executable} -m pip install git-filter-repo==2.47.0")
    place = clones.find(clone) if clone.is_dir() else None
    if place is None:
        raise Usage(f"{clone} is not a git clone")
    if (place.common_dir / "shallow").exists():
        raise Refused(f"{clone} is shallow: it does not have the history to carve", f"git -C {clone} fetch --unshallow")
    if out.exists():
        raise Refused(f"{out} exists already", "choose another --out, or remove it")
    paths = paths_of(bases)
    if not paths:
        raise Usage("the stack touches no path yet: there is nothing to carve")
    files.check_writable(out.parent)
    with files.locked(out.parent, ui.note), workspace.scratch(out.parent, f".{out.name}.patchstack-") as scratch:
        new = scratch / "repo"
        ui.step(f"copying {clone}")
        with foreign.opened(place, ui.git) as source:
            if source.resolve("HEAD^{commit}") is None:
                raise Usage(f"{clone} has no commit")
            # From our own directory for it, so that nothing of its configuration counts.
            done = Git(scratch, git_dir=new, log=ui.git).network("clone", "--bare", "--quiet", "--no-local", f"file://{source.common_dir}", str(new))
        if done.returncode:
            raise GitError(["git", "clone"], done.returncode, done.stderr.decode("utf-8", "replace"))
        git = Git(new, git_dir=new, log=ui.git)
        before = int(git.text("rev-list", "--all", "--count"))
        (scratch / "paths").write_text("".join(f"literal:{p}\n" for p in paths), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "git_filter_repo", "--force", "--quiet", "--paths-from-file", str(scratch / "paths"), "--prune-degenerate", "never"]
        ui.step(f"keeping the history of {len(paths)} paths")
        ran = subprocess.run(command, cwd=new, capture_output=True, text=True, env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")})
        if ran.returncode:
            raise GitError(command, ran.returncode, ran.stderr)
        after = int(git.text("rev-list", "--all", "--count"))
        os.rename(new, out)
    return {"paths": len(paths), "commits_before": before, "commits_after": after}
