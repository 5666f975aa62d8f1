# SPDX-License-Identifier: Apache-2.0
"""A tiny project with a tiny fake upstream, on which the tests drive the real command line.

`make_template` builds everything once: two pinned releases of a fake vLLM, each as a git tag and as an sdist; a stack of
three patches and one overlay file on the newer one. The patches are written by the tool's own `export`; what the patched
tree must hold is written down here by hand (`EDITS`, `OVERLAY`), so that the tool is never its own oracle.
"""
import compileall
import gzip
import hashlib
import io
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tarfile
from dataclasses import dataclass

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
TAG, OLD = "v1.2.3", "v1.1.0"
OVERLAY_PATH = "vllm/v1/extra_mod.py"
LINK = "vllm/models/link.py"

_PARALLEL_STATE = SPDX + '''\
"""Groups of ranks."""

_GROUP = None


def init_group(ranks, backend, *, name=None):
    """Make a group."""
    global _GROUP
    _GROUP = (ranks, backend, name)
    return _GROUP


def get_group():
    """The group; None before `init_group`."""
    return _GROUP


class Coordinator:
    def __init__(self, rank: int, world_size: int = 1):
        self.rank = rank
        self.world_size = world_size

    def gather(self, tensor, dim=0):
        return [tensor] * self.world_size


def destroy():
    """Forget the group."""
    global _GROUP
    _GROUP = None
'''

_ENVS = SPDX + '''\
"""Environment variables."""
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_HOST_IP: str = ""

environment_variables: dict[str, Callable[[], Any]] = {
    # the address of this host
    "VLLM_HOST_IP": lambda: os.getenv("VLLM_HOST_IP", ""),
}


def __getattr__(name: str):
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(name)
'''

FILES: dict[str, bytes] = {
    ".gitignore": b"vllm/_version.py\n*.log\n/ignored/\n",
    "pyproject.toml": b'[build-system]\nrequires = ["setuptools>=77", "torch == 99.0"]\nbuild-backend = "setuptools.build_meta"\n\n[project]\nname = "vllm"\ndynamic = ["version"]\n',
    "README.md": b"# vLLM, a small fake\n",
    "setup.py": b'raise SystemExit("setup.py of the sdist was run")\n',
    "vllm/__init__.py": SPDX.encode() + b'"""vLLM."""\n',
    "vllm/envs.py": _ENVS.encode(),
    "vllm/distributed/__init__.py": b"",
    "vllm/distributed/parallel_state.py": _PARALLEL_STATE.encode(),
    "vllm/crlf.py": b'"""DOS lines."""\r\nA = 1\r\nB = 2\r\nC = 3\r\n',
    "vllm/no_newline.py": b"X = 1\nY = 2",
    "vllm/old.py": SPDX.encode() + b"OLD = True\n",
    "vllm/latin1.txt": b"caf\xe9\n",
    "tools/run.sh": b"#!/bin/sh\necho run\n",
    "results/kept.log": b"tracked, although ignored\n",
    "docs/a file.md": b"a path with a space\n",
    "docs/\u00fcn\u00efcode.md": "non-ASCII: \u00fcn\u00efcode\n".encode(),
}  # fmt: skip
EXECUTABLE = {"tools/run.sh"}


def _replaced(path: str, old: str, new: str, files: dict[str, bytes] = FILES) -> bytes:
    assert files[path].count(old.encode()) == 1, (path, old)
    return files[path].replace(old.encode(), new.encode())


# topic -> (subject, author, {path: content or None for a deletion})
EDITS: dict[str, tuple[str, str, dict[str, bytes | None]]] = {
    "alpha": ("[Bugfix][Kernel] Remember the world size of a group", "Ann <ann@x.invalid>", {
        "vllm/distributed/parallel_state.py": _replaced("vllm/distributed/parallel_state.py", "def get_group():\n", 'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n'),
    }),
    "beta": ("[Core] A flag \u2013 with a dash", "Zo\u00eb \u00dcn\u00efcode <zoe@x.invalid>", {
        "vllm/envs.py": _replaced("vllm/envs.py", '    "VLLM_HOST_IP": lambda: os.getenv("VLLM_HOST_IP", ""),\n', '    "VLLM_HOST_IP": lambda: os.getenv("VLLM_HOST_IP", ""),\n    "VLLM_BETA": lambda: bool(int(os.getenv("VLLM_BETA", "0"))),\n'),
        "vllm/crlf.py": _replaced("vllm/crlf.py", "B = 2\r\n", "B = 22\r\nB2 = 3\r\n"),
        "vllm/no_newline.py": b"X = 1\nY = 3",
    }),
    "gamma": ("[Misc] A new file, and one less", "Ann <ann@x.invalid>", {
        "vllm/gamma.py": SPDX.encode() + b"from vllm.distributed.parallel_state import group_size\n\n\ndef gamma():\n    return group_size()\n",
        "vllm/old.py": None,
        "docs/a file.md": b"a path with a space, edited\n",
    }),
}  # fmt: skip
OVERLAY = {OVERLAY_PATH: SPDX.encode() + b'"""A whole new file."""\nimport vllm.envs as envs\nfrom vllm.distributed.parallel_state import Coordinator\n\n\ndef make():\n    return Coordinator(0, world_size=2) if envs.VLLM_BETA else None\n'}
TOPICS = list(EDITS)


def upstream_files() -> dict[str, bytes]:
    """The files of the newer release, as an sdist has them: the symbolic link is a file."""
    return FILES | {LINK: FILES["vllm/envs.py"]}


def patched_files(upto: int | None = None) -> dict[str, bytes]:
    """The files after the first `upto` patches, without the overlay (default: all patches and the overlay)."""
    files = dict(upstream_files())
    for _, _, edits in list(EDITS.values())[:upto]:
        for path, data in edits.items():
            files[path] = data
    files = {path: data for path, data in files.items() if data is not None}
    return files | (OVERLAY if upto is None else {})


def message(topic: str, subject: str, *extra: str) -> str:
    """A commit message with every trailer of the project."""
    trailers = [f"Topic: {topic}", "Upstream-Status: Pending", "Origin: vendor", "Retire-When: upstream has it", "Requires: none",
                "Tests: tests/stack", "Signed-off-by: Ann <ann@x.invalid>"]  # fmt: skip
    return "\n".join([subject, "", f"Why {topic} is needed.", *extra, "", *trailers]) + "\n"


def git(cwd: pathlib.Path, *args: str, env: dict[str, str] | None = None, input: bytes | None = None, check: bool = True) -> str:
    """Plain git for the tests' own use, without any user configuration."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "T", "GIT_AUTHOR_EMAIL": "t@x.invalid", "GIT_EDITOR": ":",
              "GIT_COMMITTER_NAME": "T", "GIT_COMMITTER_EMAIL": "t@x.invalid", "GIT_AUTHOR_DATE": "1767300000 +0100", "GIT_COMMITTER_DATE": "1767300000 +0100"} | (env or {})  # fmt: skip
    done = subprocess.run(["git", "-c", "gc.auto=0", *args], cwd=cwd, env=clean, input=input, capture_output=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"git {' '.join(args)}: {done.stderr.decode()}")
    return done.stdout.decode("utf-8", "surrogateescape").rstrip("\n")


def write_files(root: pathlib.Path, files: dict[str, bytes | None]) -> None:
    for path, data in files.items():
        target = root / path
        if data is None:
            target.unlink()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if path in EXECUTABLE:
            target.chmod(0o755)


def commit(tree: pathlib.Path, edits: dict[str, bytes | None], text: str, author: str = "Ann <ann@x.invalid>") -> str:
    """Write the edits and commit them; return the commit id."""
    write_files(tree, edits)
    git(tree, "add", "-A", "-f", "--", *edits)
    git(tree, "commit", "--quiet", "--cleanup=verbatim", f"--author={author}", "-F", "-", input=text.encode())
    return git(tree, "rev-parse", "HEAD")


def snapshot(root: pathlib.Path, *, skip: tuple[str, ...] = (".git",)) -> dict[str, bytes]:
    """path -> content of every file below `root`; links as `-> target`, the executable bit as a suffix of the path."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and f != "__pycache__"]
        for name in names:
            path = pathlib.Path(folder, name)
            relative = str(path.relative_to(root))
            if path.is_symlink():
                found[relative] = b"-> " + os.fsencode(os.readlink(path))
            else:
                found[relative + ("*" if path.stat().st_mode & stat.S_IXUSR else "")] = path.read_bytes()
    return found


def expected(files: dict[str, bytes], *, link: bool = False) -> dict[str, bytes]:
    """`files` in the form of `snapshot`. `link`: from git, where the symbolic link is one."""
    shown = {path + ("*" if path in EXECUTABLE else ""): data for path, data in files.items()}
    return shown | ({LINK: b"-> ../envs.py"} if link else {})


def write_sdist(path: pathlib.Path, version: str, files: dict[str, bytes], commit_id: str, extra: list[tuple[tarfile.TarInfo, bytes | None]] = ()) -> str:
    """An sdist as setuptools writes it; returns its sha256. `extra` members come last."""
    top = f"vllm-{version}"
    generated = {
        "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n".encode(),
        "setup.cfg": b"[egg_info]\ntag_build = \ntag_date = 0\n",
        "vllm.egg-info/PKG-INFO": b"Name: vllm\n",
        "vllm.egg-info/SOURCES.txt": b"README.md\n",
        "vllm/_version.py": f"__version__ = version = '{version}'\n__commit_id__ = commit_id = 'g{commit_id}'\n".encode(),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted((files | generated).items()):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode = len(data), 0o755 if name in EXECUTABLE else 0o644
            archive.addfile(info, io.BytesIO(data))
        for info, data in extra:
            archive.addfile(info, io.BytesIO(data) if data is not None else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(buffer.getvalue(), 1, mtime=0))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Project:
    """One throw-away copy of the project, its fake upstream and its cache. Everything lives below `room`."""

    def __init__(self, room: pathlib.Path) -> None:
        self.room = room
        self.root, self.index, self.upstream = room / "project", room / "index", room / "upstream"
        self.cache, self.home, self.temp = room / "cache", room / "home", room / "temp"
        self.tree = room / "work" / "tree"

    def sdist(self, tag: str = TAG) -> pathlib.Path:
        return self.index / f"vllm-{tag[1:]}.tar.gz"

    def folder(self, tag: str = TAG) -> pathlib.Path:
        return self.root / "patches" / tag

    def commit_of(self, tag: str = TAG) -> str:
        return git(self.upstream, "rev-parse", f"{tag}^{{commit}}")

    def environment(self, **extra: str | None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PIP_", "VLLM_", "PYTEST_"))}
        kept |= {"HOME": str(self.home), "VLLM_STACK_CACHE": str(self.cache), "TMPDIR": str(self.temp), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index),
                 "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        return {k: v for k, v in (kept | extra).items() if v is not None}

    def run(self, *args: object, code: int | None = 0, env: dict[str, str | None] | None = None, cwd: pathlib.Path | None = None, prefix: tuple[str, ...] = (), timeout: float = 600) -> Result:
        """`python apply.py ARGS`; the exit code must be `code` (None: any)."""
        command = [*prefix, sys.executable, str(self.root / "apply.py"), *map(str, args)]
        done = subprocess.run(command, cwd=cwd or self.room, env=self.environment(**(env or {})), capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout)
        result = Result(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))
        assert code is None or result.code == code, f"{' '.join(map(str, args))}: {result}"
        return result

    def apply(self, *args: object, dest: pathlib.Path | None = None, **options) -> Result:
        return self.run("apply", "--dest", dest or self.tree, *args, **options)

    def clone(self, name: str = "clone", *, at: str = TAG) -> pathlib.Path:
        """A user's own clone of upstream, on a branch at the pin."""
        target = self.room / "work" / name
        git(self.room, "clone", "--quiet", "--no-hardlinks", "--template=", str(self.upstream), str(target))
        git(target, "checkout", "--quiet", "-B", "mine", at)
        return target

    def patches(self, tag: str = TAG) -> dict[str, bytes]:
        """Every file of patches/<tag>/."""
        return snapshot(self.folder(tag))

    def leftovers(self) -> list[str]:
        """Scratch places that a run should have removed (the system's temporary folder apart)."""
        found = []
        for folder in (self.room / "work", self.root / "patches", self.cache / "bases", self.cache / "downloads", self.root / "vllm_overlay"):
            found += [str(p.relative_to(self.room)) for p in folder.rglob(".*") if ".git" not in p.relative_to(folder).parts and p.name != ".gitignore"]
        return found


def _base_toml(tag: str, commit_id: str, sha: str, repository: pathlib.Path, default: bool, overlay: list[str]) -> str:
    return (f'tag = "{tag}"\nversion = "{tag[1:]}"\ncommit = "{commit_id[:9]}"\nsdist_sha256 = "{sha}"\nrepository = "file://{repository}"\n'
            f"default = {'true' if default else 'false'}\noverlay = {json.dumps(overlay)}\n")  # fmt: skip


def old_files() -> dict[str, bytes]:
    """The older release: its parallel_state.py differs, envs.py is not there yet."""
    files = {k: v for k, v in FILES.items() if k != "vllm/envs.py"}
    return files | {"vllm/distributed/parallel_state.py": _replaced("vllm/distributed/parallel_state.py", '"""Groups of ranks."""', '"""Groups of ranks (old)."""')}


def make_template(room: pathlib.Path) -> Project:
    """Build the project in `room`: upstream, sdists, patches written by `export`, and a warm cache."""
    project = Project(room)
    for folder in (project.home, project.temp, project.cache, project.upstream, room / "work"):
        folder.mkdir(parents=True)
    shutil.copytree(REPOSITORY / "scripts", project.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(project.root / "scripts", quiet=1)  # once: it takes longer than most commands
    shutil.copy2(REPOSITORY / "apply.py", project.root / "apply.py")
    write_files(project.root / "vllm_overlay", OVERLAY)
    (project.root / "tests" / "stack").mkdir(parents=True)  # the patches' `Tests:` name it

    up = project.upstream
    git(up, "init", "--quiet", "--template=", "--initial-branch=main", ".")
    commit(up, old_files(), f"{OLD}\n")
    git(up, "tag", OLD)
    (up / "vllm/models").mkdir()
    (up / LINK).symlink_to("../envs.py")
    git(up, "add", LINK)
    commit(up, FILES, f"{TAG}\n")
    git(up, "tag", "-a", "-m", TAG, TAG)
    for tag, files, overlay in ((OLD, old_files(), []), (TAG, upstream_files(), [OVERLAY_PATH])):
        sha = write_sdist(project.sdist(tag), tag[1:], files, project.commit_of(tag)[:9])
        project.folder(tag).mkdir(parents=True)
        (project.folder(tag) / "base.toml").write_text(_base_toml(tag, project.commit_of(tag), sha, up, tag == TAG, overlay))
        (project.folder(tag) / "series").write_text("" if tag == TAG else "# the old base\nupstream gamma v0.9.0 vllm-project/vllm#1\nn/a beta no such file there\n")

    tree = project.clone("dev")
    for topic, (subject, author, edits) in EDITS.items():
        commit(tree, edits, message(topic, subject), author)
    project.run("export", tree, "--base", TAG)
    old = project.clone("dev-old", at=OLD)
    path = "vllm/distributed/parallel_state.py"
    commit(old, {path: old_files()[path].replace(b"_GROUP = None\n\n\ndef init", b"_GROUP = None  # alpha\n\n\ndef init")}, message("alpha", "[Bugfix] Alpha on the old base"))
    project.run("export", old, "--base", OLD)
    for spent in (tree, old):
        shutil.rmtree(spent)
    return project


def copy_of(template: Project, room: pathlib.Path) -> Project:
    """A fresh copy of the template in `room`."""
    shutil.copytree(template.room, room, symlinks=True, dirs_exist_ok=True)
    project = Project(room)
    for toml in (project.root / "patches").glob("*/base.toml"):
        toml.write_text(toml.read_text().replace(str(template.upstream), json.dumps(str(project.upstream), ensure_ascii=False)[1:-1]))
    return project
