# SPDX-License-Identifier: Apache-2.0
"""The single door to git.

Two kinds of command:

* *content* commands (apply, commit, format-patch, checkout) run sealed: no user or system configuration, a fixed identity
  and locale, hooks and transports off, replacement objects and commit graphs not believed. `-c` overrides what the
  configuration of one of our own repositories could change; a repository of somebody else is opened through foreign.py.
* *network* commands (fetch) run as the user would: their proxy, certificates, credentials and `url.insteadOf` apply.
"""
import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from . import workspace
from .errors import GitError, Refused

MINIMUM = (2, 39)
IDENTITY = ("vllm-dcp-stack", "stack@vllm-dcp-stack.invalid")

# Repository-local configuration that could change the outcome of a content command.
_SEAL = {
    "core.autocrlf": "false", "core.safecrlf": "false", "core.eol": "lf", "core.fileMode": "true", "core.ignoreCase": "false",
    "core.hooksPath": "/dev/null", "core.attributesFile": "/dev/null", "core.excludesFile": "/dev/null", "core.quotePath": "false",
    "core.symlinks": "true", "core.precomposeUnicode": "false", "core.sparseCheckout": "false", "core.fsmonitor": "false",
    "core.trustctime": "false", "core.untrackedCache": "keep", "core.logAllRefUpdates": "true", "core.commitGraph": "false", "core.multiPackIndex": "false",
    "commit.gpgSign": "false", "apply.whitespace": "nowarn", "apply.ignoreWhitespace": "no", "i18n.commitEncoding": "utf-8",
    "i18n.logOutputEncoding": "utf-8", "mailinfo.scissors": "false", "rerere.enabled": "false", "submodule.recurse": "false",
    "gc.auto": "0", "maintenance.auto": "false", "advice.detachedHead": "false", "checkout.workers": "0", "diff.renames": "false",
    "status.renames": "false", "merge.conflictStyle": "diff3", "init.templateDir": "", "log.showSignature": "false",
    "core.compression": "1", "core.commentChar": "#", "trailer.separators": ":", "fastimport.unpackLimit": "1", "core.bigFileThreshold": "512m",
}  # fmt: skip
_DROPPED_ENVIRONMENT = re.compile(r"GIT_.*|LC_.*|LANG|LANGUAGE|TZ|EMAIL")
# What would make a network command read or write another repository than the one it is given.
_OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR",
                     "GIT_NAMESPACE", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE", "GIT_QUARANTINE_PATH", "GIT_DEFAULT_HASH", "GIT_PREFIX", "GIT_INTERNAL_SUPER_PREFIX"}  # fmt: skip


def sealed_environment() -> dict[str, str]:
    """The environment of a content command: nothing of the user's git set-up, locale or time zone."""
    kept = {k: v for k, v in os.environ.items() if not _DROPPED_ENVIRONMENT.fullmatch(k)}
    name, email = IDENTITY
    return kept | {
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0",
        "GIT_EDITOR": ":", "GIT_PAGER": "cat", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C", "TZ": "UTC",
        "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "",  # the first is known to git 2.45 and newer; the second stops every fetch
        "GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email, "GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email,
    }  # fmt: skip


class Git:
    """Git commands in one repository.

    `git_dir` is always passed, so that git never looks for a repository above `cwd`: `git apply` inside another repository's
    sub-directory exits 0 and changes nothing. `common_dir`: where configuration, refs and objects are, if elsewhere.
    """

    def __init__(self, cwd: pathlib.Path, *, git_dir: pathlib.Path, work_tree: pathlib.Path | None = None, index_file: pathlib.Path | None = None,
                 common_dir: pathlib.Path | None = None, log: Callable[[str], None] | None = None) -> None:  # fmt: skip
        self.cwd = cwd
        self.git_dir = git_dir
        self.work_tree = work_tree
        self.index_file = index_file
        self.common_dir = common_dir
        self.log = log
        self._trees: dict[str, str] = {}

    @classmethod
    @contextlib.contextmanager
    def scratch(cls, *git_dirs: pathlib.Path, log: Callable[[str], None] | None = None) -> Iterator["Git"]:
        """An empty repository that can read the objects of `git_dirs` and has none of their configuration; removed at the end."""
        with workspace.temporary() as folder:
            git = cls(folder, git_dir=folder, log=log)
            (folder / "HEAD").write_text("ref: refs/heads/scratch\n")  # what `git init --bare` makes, without another process
            (folder / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")
            for name in ("objects", "objects/pack", "refs"):
                (folder / name).mkdir()
            write_alternates(folder, [d / "objects" for d in git_dirs])
            write_shallow(folder, {line for d in git_dirs if (d / "shallow").is_file() for line in (d / "shallow").read_text().split()})
            yield git

    def with_index(self, index_file: pathlib.Path) -> "Git":
        """The same repository with another index."""
        return Git(self.cwd, git_dir=self.git_dir, work_tree=self.work_tree, index_file=index_file, common_dir=self.common_dir, log=self.log)

    def _places(self) -> dict[str, str]:
        """The variables that tell git where everything is."""
        named = {"GIT_DIR": self.git_dir, "GIT_COMMON_DIR": self.common_dir, "GIT_WORK_TREE": self.work_tree, "GIT_INDEX_FILE": self.index_file}
        return {k: str(v) for k, v in named.items() if v is not None}

    def _call(self, argv: Sequence[str], environment: dict[str, str], input: bytes | None) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(argv, cwd=self.cwd, env=environment | self._places(), input=input, capture_output=True,
                                  stdin=None if input is not None else subprocess.DEVNULL, pass_fds=tuple(workspace.held_fds))  # fmt: skip
        except FileNotFoundError:
            if not self.cwd.exists():
                raise Refused(f"no such directory: {self.cwd}") from None
            raise Refused("git is not installed", "install git 2.39 or newer") from None

    def _sealed(self, args: Sequence[str]) -> list[str]:
        if self.log:
            self.log("git " + " ".join(args))
        return ["git", *(part for key, value in _SEAL.items() for part in ("-c", f"{key}={value}")), *args]

    def try_run(self, *args: str, input: bytes | None = None, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a content command and return what it did, whatever its exit code."""
        return self._call(self._sealed(args), sealed_environment() | dict(env or {}), input)

    def popen(self, *args: str, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a sealed command; the caller feeds it and waits for it."""
        return subprocess.Popen(self._sealed(args), cwd=self.cwd, env=sealed_environment() | dict(env or {}) | self._places(), stdin=stdin, stdout=stdout, stderr=stderr,
                                pass_fds=tuple(workspace.held_fds))  # fmt: skip

    def start(self, *args: str, stdin: pathlib.Path | None = None, env: Mapping[str, str] | None = None) -> "Started":
        """Start a sealed command that runs beside others. One that says more than a pipe holds waits until it is asked."""
        with (stdin or pathlib.Path(os.devnull)).open("rb") as f:
            return Started(["git", *args], self.popen(*args, stdin=f, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env))

    def run(self, *args: str, input: bytes | None = None, env: Mapping[str, str] | None = None) -> bytes:
        """Run a content command; return its stdout. Raises GitError."""
        done = self.try_run(*args, input=input, env=env)
        if done.returncode:
            raise GitError(["git", *args], done.returncode, done.stderr.decode("utf-8", "replace"))
        return done.stdout

    def text(self, *args: str, input: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        """`run`, decoded, without the last newline."""
        return self.run(*args, input=input, env=env).decode("utf-8", "surrogateescape").rstrip("\n")

    def ok(self, *args: str) -> bool:
        """Whether a content command exits 0."""
        return self.try_run(*args).returncode == 0

    def network(self, *args: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command with the user's own configuration (proxy, certificates, credentials); no prompt."""
        if self.log:
            self.log("git " + " ".join(args))
        kept = {k: v for k, v in os.environ.items() if k not in _OTHER_REPOSITORY}
        quiet = ("-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", f"core.hooksPath={os.devnull}")
        return self._call(["git", *quiet, *args], kept | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}, None)

    def tree_of(self, commit: str) -> str:
        """The tree of a commit. Asked once for each: it cannot change."""
        if commit not in self._trees:
            self._trees[commit] = self.text("rev-parse", f"{commit}^{{tree}}")
        return self._trees[commit]

    def resolve(self, revision: str) -> str | None:
        """The object id of `revision`, None if there is none."""
        done = self.try_run("rev-parse", "--verify", "--quiet", "--end-of-options", revision)
        return done.stdout.decode().strip() or None

    def blobs(self, treeish: str, paths: Sequence[str]) -> dict[str, str]:
        """`path -> "<mode> <blob id>"` of the given paths in a tree; absent paths are left out."""
        if not paths:
            return {}
        out = self.run("ls-tree", "-z", "-r", treeish, "--", *paths, env={"GIT_LITERAL_PATHSPECS": "1"})
        found = {}
        for record in out.decode("utf-8", "surrogateescape").split("\0"):
            if record:
                meta, path = record.split("\t", 1)
                mode, _, oid = meta.split(" ")
                found[path] = f"{mode} {oid}"
        return found


class Started:
    """A command that is under way."""

    def __init__(self, argv: list[str], process: subprocess.Popen[bytes]) -> None:
        self._argv, self._process = argv, process

    def text(self) -> str:
        """Wait; its stdout without the last newline. Raises GitError."""
        out, err = self._process.communicate()
        if self._process.returncode:
            raise GitError(self._argv, self._process.returncode, err.decode("utf-8", "replace"))
        return out.decode("utf-8", "surrogateescape").rstrip("\n")


def write_alternates(git_dir: pathlib.Path, objects: Sequence[pathlib.Path]) -> None:
    """Let the repository `git_dir` read the objects of others. Each path is quoted as git quotes: it may hold a colon or a line end."""
    escaped = [os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") for path in objects]
    (git_dir / "objects" / "info").mkdir(exist_ok=True)
    (git_dir / "objects" / "info" / "alternates").write_bytes(b"".join(b'"%b"\n' % path for path in escaped))


def write_shallow(git_dir: pathlib.Path, commits: Iterable[str]) -> None:
    """Say that the parents of these commits are not there."""
    if lines := "".join(f"{commit}\n" for commit in sorted(commits)):
        (git_dir / "shallow").write_text(lines)


def require_git(log: Callable[[str], None] | None = None) -> str:
    """The version of git, refused below 2.39."""
    out = Git(pathlib.Path("/"), git_dir=pathlib.Path(os.devnull), log=log).text("version")
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", out)
    if not match:
        raise Refused(f"cannot read the version of git from {out!r}", "install git 2.39 or newer")
    if (int(match[1]), int(match[2])) < MINIMUM:
        raise Refused(f"git {match[0]} is too old: 2.39 or newer is needed", "install a newer git, or put one first on PATH")
    return match[0]
