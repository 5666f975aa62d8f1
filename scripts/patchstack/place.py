# SPDX-License-Identifier: Apache-2.0
"""Put a built tree where nothing is yet, in one step.

Beside the target a repository is made in a scratch folder: the commits are built and checked, the refs set, the files written.
Then it is renamed into place. A run that is killed before has changed nothing; the next one removes what it left.
"""
import errno
import os
import pathlib
from collections.abc import Callable

from . import cache, files, workspace
from .git import Git
from .gitstate import APPLIED_REF, BASE_REF, BEFORE_KEY, BRANCH_REF, TAG_KEY, UPSTREAM_BRANCH
from .inplace import scratch_prefix
from .pins import Base
from .report import Ui
from .stack import Built
from .upstream import Upstream


def create(target: pathlib.Path, base: Base, upstream: Upstream, make: Callable[[Git], Built], ui: Ui) -> Built | None:
    """Make `target` from scratch; None if somebody made it meanwhile. `make(git)` builds and checks the commits in the new repository."""
    files.check_writable(target.parent)
    with workspace.scratch(target.parent, scratch_prefix(target)) as scratch:
        new = scratch / "tree"
        new.mkdir()
        git = Git(new, git_dir=new / ".git", work_tree=new, log=ui.git)
        git.run("init", "--quiet", f"--initial-branch={UPSTREAM_BRANCH}", ".")
        cache.copy_objects(upstream.git_dir, new / ".git")
        built = make(git)
        for ref, commit in ((f"refs/heads/{UPSTREAM_BRANCH}", built.base_commit), (BRANCH_REF, built.commit), (BASE_REF, built.base_commit), (APPLIED_REF, built.commit)):
            git.run("update-ref", ref, commit)
        git.run("config", TAG_KEY, base.tag)
        git.run("config", BEFORE_KEY, UPSTREAM_BRANCH)
        git.run("symbolic-ref", "HEAD", BRANCH_REF)
        ui.step(f"writing the tree ({target})")
        git.run("reset", "--quiet", "--hard", "HEAD")
        if upstream.version_file is not None:  # git-ignored upstream; without it `import vllm` knows no version
            (new / "vllm" / "_version.py").write_bytes(upstream.version_file)
        try:
            os.rename(new, target)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return None
    return built
