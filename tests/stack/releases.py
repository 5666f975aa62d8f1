# SPDX-License-Identifier: Apache-2.0
"""Later releases of the fake upstream, for `drift`, `rebase` and `carve`: what each holds is written down by the test."""
import hashlib
import json
import os
import pathlib
import shutil

from .project import EDITS, FILES, Project, Result, commit, git, snapshot, upstream_files, write_files, write_sdist

NEW, NEWER = "v1.3.0", "v1.4.0"
STATE = "vllm/distributed/parallel_state.py"
Edits = dict[str, bytes | None]


def replaced(path: str, old: str, new: str, files: dict[str, bytes] = FILES) -> bytes:
    assert files[path].count(old.encode()) == 1, (path, old)
    return files[path].replace(old.encode(), new.encode())


# What upstream did to parallel_state.py, seen from alpha, which adds a function above `def get_group():`.
MOVED = {STATE: replaced(STATE, '"""Groups of ranks."""\n', '"""Groups of ranks.\n\nMore words.\n"""\n')}
NEAR = {STATE: replaced(STATE, '    """The group; None before `init_group`."""\n', '    """The group, or None."""\n')}
CLASH = {STATE: replaced(STATE, "    return _GROUP\n\n\ndef get_group():\n", "    return _GROUP\n\n\ndef other():\n    return 1\n\n\ndef get_group():\n")}
TAKEN = {path: data for path, data in EDITS["alpha"][2].items()}


def merged(*edits: Edits) -> Edits:
    return {path: data for part in edits for path, data in part.items()}


def release(project: Project, *edits: Edits, tag: str = NEW, messages: list[str] | None = None) -> str:
    """Commit the edits upstream, one commit each, tag the last and publish its sdist; return the commit id.

    The sdist lies in the index and in the cache's downloads, so that a test need not wait for pip.
    """
    up = project.upstream
    for number, part in enumerate(edits or ({"docs/notes.md": f"{tag}\n".encode()},)):
        for path in part:
            if (up / path).is_symlink():
                (up / path).unlink()
        commit(up, part, messages[number] if messages else f"Change {number} of {tag}\n")
    git(up, "tag", tag)
    files = {p.removesuffix("*"): d for p, d in snapshot(up).items() if not d.startswith(b"-> ")}
    files |= {p: (up / p).read_bytes() for p in git(up, "ls-files").splitlines() if (up / p).is_symlink()}
    write_sdist(project.sdist(tag), tag[1:], files, project.commit_of(tag)[:9])
    (project.cache / "downloads").mkdir(parents=True, exist_ok=True)
    shutil.copy2(project.sdist(tag), project.cache / "downloads")
    return project.commit_of(tag)


def directory(project: Project, edits: Edits, name: str = "next") -> pathlib.Path:
    """A release as a plain directory, which `drift --ref` reads without any history: the pinned files with `edits`."""
    folder = project.room / name
    files = {path: data for path, data in (upstream_files() | edits).items() if data is not None}
    write_files(folder, files)
    return folder


def drift(project: Project, *refs: object, code: int | None = None, extra: tuple = (), **options) -> dict[str, dict]:
    """topic -> what `drift --json` says of it on the first release; the whole report under ''."""
    told = project.run("drift", "--json", *(part for ref in refs for part in ("--ref", ref)), *extra, code=code, **options).json
    assert "drifts" in told, told
    return {p["topic"]: p for p in told["drifts"][0]["patches"]} | {"": told["drifts"][0]}


def states(told: dict[str, dict]) -> dict[str, str]:
    return {topic: patch["state"] for topic, patch in told.items() if topic}


def digest(root: pathlib.Path) -> str:
    """One hash of every file, mode and link below `root`, .git included."""
    found = snapshot(root, skip=())
    return hashlib.sha256(json.dumps([[k, v.hex()] for k, v in sorted(found.items())]).encode()).hexdigest()


def add_patch(project: Project, topic: str, edits: Edits, *, trailers: dict[str, str] | None = None, subject: str | None = None) -> None:
    """One more patch at the end of the stack, made by `apply`, a commit and `export`."""
    tree = project.room / "work" / f"add-{topic}"
    project.apply(dest=tree)
    text = _message(topic, subject, trailers)
    commit(tree, edits, text)
    project.run("export", tree)
    shutil.rmtree(tree)


def _message(topic: str, subject: str | None, trailers: dict[str, str] | None) -> str:
    told = {"Topic": topic, "Upstream-Status": "Pending", "Origin": "vendor", "Retire-When": "upstream has it", "Requires": "none", "Tests": "tests/stack",
            "Signed-off-by": "Ann <ann@x.invalid>"} | (trailers or {})  # fmt: skip
    return "\n".join([subject or f"[Core] Add {topic}", "", "Why.", "", *(f"{k}: {v}" for k, v in told.items())]) + "\n"


def work_tree(project: Project, tag: str = NEW) -> pathlib.Path:
    return project.root / "build" / f"rebase-{tag}"


def resolve(project: Project, edits: Edits, tag: str = NEW) -> None:
    """What a human does at a stop: write the files and `git add` them."""
    tree = work_tree(project, tag)
    write_files(tree, edits)
    git(tree, "add", "--", *edits)


def make_default(project: Project, tag: str) -> None:
    """`tag` becomes the default base, the only one."""
    for toml in (project.root / "patches").glob("*/base.toml"):
        text = toml.read_text()
        toml.write_text(text.replace("default = true", "default = false").replace("default = false", f"default = {'true' if toml.parent.name == tag else 'false'}"))


def rebase(project: Project, *args: object, code: int = 0, **options) -> Result:
    return project.run("rebase", *args, code=code, **options)


def killer(project: Project, which: str, *, count: int = 1, when: str = "before") -> dict[str, str]:
    """An environment in which the tool is killed (SIGKILL) at its `count`-th git command that contains `which`.

    `before` or `after` git has run; `torn`: git has changed the files, but neither index nor HEAD, and left its lock.
    """
    folder = project.room / f"shim-{len(list(project.room.glob('shim-*')))}"
    folder.mkdir()
    real = shutil.which("git")
    (folder / "git").write_text(f"""#!/bin/sh
case " $* " in
*"{which}"*)
    n=$(cat {folder}/n 2>/dev/null || echo 0); n=$((n + 1)); echo $n > {folder}/n
    if [ $n -eq {count} ]; then
        case {when} in
        after) {real} "$@" ;;
        torn) {real} "$@"; {real} -C "$PWD" update-ref --no-deref HEAD "$({real} rev-parse HEAD^)"; {real} read-tree HEAD; : > "$PWD/.git/index.lock" ;;
        esac
        kill -9 $PPID
        exit 1
    fi ;;
esac
exec {real} "$@"
""")
    (folder / "git").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

