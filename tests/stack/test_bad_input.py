# SPDX-License-Identifier: Apache-2.0
"""Patches, locks, sources and surroundings that are wrong: each refused with its own exit code, naming what and where."""
import gzip
import hashlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from . import project as fake
from .project import OLD, TAG, expected, git, patched_files, snapshot, upstream_files, write_sdist


def doctored(project, edit, topic: str = "alpha") -> None:
    """Change a patch file, and the lock so that it describes it: what must fire is the check of the patch itself."""
    path = project.folder() / f"{topic}.patch"
    data = edit(path.read_bytes())
    path.write_bytes(data)
    lock = json.loads((project.folder() / "lock.json").read_text())
    entry = next(p for p in lock["patches"] if p["topic"] == topic)
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    (project.folder() / "lock.json").write_text(json.dumps(lock))


PARALLEL = b"vllm/distributed/parallel_state.py"
NEW = b"diff --git a/%b b/%b\nnew file mode %b\nindex 0000000000000000000000000000000000000000..257cc5642cb1a054f08cc83f2d943e56fd3ebe99\n--- /dev/null\n+++ b/%b\n@@ -0,0 +1 @@\n+foo\n"


def adding(path: bytes, mode: bytes = b"100644"):
    return lambda data: data + NEW % (path, path, mode, path)


HOSTILE = {
    "dots": (lambda d: d.replace(PARALLEL, b"../../evil.py"), "../../evil.py"),
    "dots inside": (adding(b"vllm/../../evil.py"), "vllm/../../evil.py"),
    "absolute": (lambda d: d.replace(b"a/" + PARALLEL, b"a//tmp/evil.py").replace(b"b/" + PARALLEL, b"b//tmp/evil.py"), "/tmp/evil.py"),
    "git folder": (adding(b".git/hooks/post-checkout", b"100755"), ".git"),
    "git folder in capitals": (adding(b"sub/.GIT/config"), ".GIT"),
    "backslash": (adding(b"vllm\\..\\evil.py"), "backslash"),
    "drive": (adding(b"C:/evil.py"), "C:/evil.py"),
    "symbolic link": (adding(b"vllm/link", b"120000"), "symbolic link"),
    "submodule": (adding(b"vllm/sub", b"160000"), "submodule"),
    "link, then a file through it": (lambda d: adding(b"out/evil.py")(adding(b"out", b"120000")(d)), "symbolic link"),
    "mode to a link": (lambda d: d + b"diff --git a/README.md b/README.md\nold mode 100644\nnew mode 120000\n", "symbolic link"),
    "rename": (lambda d: d + b"diff --git a/README.md b/NEW.md\nsimilarity index 100%\nrename from README.md\nrename to NEW.md\n", "rename"),
    "copy": (lambda d: d + b"diff --git a/README.md b/NEW.md\nsimilarity index 100%\ncopy from README.md\ncopy to NEW.md\n", "copies"),
    "rename to outside": (lambda d: d + b"diff --git a/README.md b/../NEW.md\nsimilarity index 100%\nrename from README.md\nrename to ../NEW.md\n", "../NEW.md"),
    "binary": (lambda d: d + b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000000000000000000000000000000000000..257cc5642cb1a054f08cc83f2d943e56fd3ebe99\nGIT binary patch\nliteral 1\nIcmZPo\n\n", "binary"),
    "quoted dots": (lambda d: d + b'diff --git "a/\\056\\056/evil" "b/\\056\\056/evil"\nnew file mode 100644\n--- /dev/null\n+++ "b/\\056\\056/evil"\n@@ -0,0 +1 @@\n+foo\n', "../evil"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_patch_that_leaves_the_tree_is_refused(project, name):
    edit, said = HOSTILE[name]
    doctored(project, edit)
    before = sorted(p for p in project.room.rglob("*"))
    done = project.apply(code=3)
    assert said in done.err and re.search(r"alpha\.patch:\d+: ", done.err), done
    assert sorted(p for p in project.room.rglob("*")) == before
    lint = project.run("lint", code=1)
    assert "alpha.patch" in lint.out


@pytest.mark.parametrize("name,edit,said", [
    ("cut in a hunk", lambda d: d[: d.index(b"+    return len(")], "cut off"),
    ("empty", lambda d: b"", "not a patch"),
    ("no diff", lambda d: d[: d.index(b"diff --git")], "not a patch"),
    ("no author", lambda d: re.sub(rb"(?m)^From: .*\n", b"", d), "Author"),
    ("no date", lambda d: re.sub(rb"(?m)^Date: .*\n", b"", d), "Date"),
    ("noise", lambda d: os.urandom(3000), "not a patch"),
])  # fmt: skip
def test_a_damaged_patch(project, name, edit, said):
    doctored(project, edit)
    done = project.apply(code=None)
    assert done.code in (2, 3) and said in done.err and "alpha.patch" in done.err, done
    assert not project.tree.exists()


def test_a_patch_that_is_listed_but_missing(project):
    (project.folder() / "beta.patch").unlink()
    done = project.apply(code=2)
    assert "beta.patch is missing" in done.err and "series" in done.err


@pytest.mark.parametrize("line", ["Alpha.patch", "../alpha.patch", "alpha.patch extra", "what is this", "upstream alpha", "part x nothing", "alpha.patch\nalpha.patch"])
def test_a_bad_series(project, line):
    (project.folder() / "series").write_text(f"# c\n{line}\n")
    assert re.search(r"series:[23]: ", project.apply(code=2).err)


def test_a_patch_that_does_not_apply_is_explained(project):
    doctored(project, lambda d: d.replace(b" def get_group():", b" def get_the_group():"))
    done = project.apply(code=4)
    for said in ("alpha.patch does not apply", "file: vllm/distributed/parallel_state.py", "hunk 1", "expected:", "def get_the_group():", "found at line", "! def get_group():"):
        assert said in done.err, done
    assert "next:" in done.err and not project.tree.exists() and project.leftovers() == []


def test_the_second_hunk_is_named(project):
    tree = project.clone()
    text = fake.FILES["vllm/distributed/parallel_state.py"]
    fake.commit(tree, {"vllm/distributed/parallel_state.py": text.replace(b'"""Groups of ranks."""', b'"""Groups."""').replace(b"    _GROUP = None\n", b"    _GROUP = ()\n")}, fake.message("alpha", "[Core] Two hunks"))
    project.run("export", tree, "--base", TAG, "--allow-drop")
    doctored(project, lambda d: d.replace(b'     """Forget the group."""', b'     """Forget."""'))
    done = project.apply(code=4)
    assert "hunk 2" in done.err and '"""Forget."""' in done.err and '! ' in done.err


@pytest.mark.parametrize("edit,said", [
    (lambda d: d.replace(b"vllm/old.py", b"vllm/gone.py"), "vllm/gone.py"),
    (lambda d: d.replace(b"vllm/gamma.py", b"vllm/envs.py"), "vllm/envs.py"),
])  # fmt: skip
def test_a_missing_or_existing_file_is_named(project, edit, said):
    doctored(project, edit, "gamma")
    done = project.apply(code=4)
    assert "gamma.patch does not apply" in done.err and said in done.err


def test_no_fuzz(project):
    """One wrong context line at the edge of a hunk: `patch` would take it, an offset would not matter."""
    doctored(project, lambda d: re.sub(rb"(?m)^     return _GROUP\n", b"     return _group\n", d))
    project.apply(code=4)


# ---- the lock


@pytest.mark.parametrize("damage,code", [
    (lambda t: t[: len(t) // 2], 2), (lambda t: "", 2), (lambda t: "[]", 2), (lambda t: t.replace('"schema": 1', '"schema": 99'), 2), (None, 2),
    (lambda t: re.sub(r'("result_tree": ")[0-9a-f]{6}', r"\g<1>abcdef", t), 3),
    (lambda t: re.sub(r'("post_tree": ")[0-9a-f]{6}', r"\g<1>abcdef", t), 3),
    (lambda t: re.sub(r'("base_tree": ")[0-9a-f]{6}', r"\g<1>abcdef", t), 0),  # then the touched files decide
    (lambda t: re.sub(r'("sha256": ")[0-9a-f]{6}', r"\g<1>abcdef", t), 3),
    (lambda t: t.replace('"topic": "beta"', '"topic": "bet"'), 3),
    (lambda t: re.sub(r'(100644 )[0-9a-f]{6}', r"\g<1>abcdef", t), 3),
])  # fmt: skip
def test_a_lock_that_is_damaged_or_stale(project, damage, code):
    path = project.folder() / "lock.json"
    text = path.read_text()
    path.unlink() if damage is None else path.write_text(damage(text))
    assert damage is None or path.read_text() != text
    done = project.apply(code=code)
    assert code == 0 or ("lock" in done.err and "next:" in done.err and not project.tree.exists()), done


@pytest.mark.parametrize("what", ["alpha.patch", "overlay", "series"])
def test_files_changed_behind_the_lock(project, what):
    path = {"overlay": project.root / "vllm_overlay" / fake.OVERLAY_PATH, "series": project.folder() / "series"}.get(what, project.folder() / what)
    path.write_bytes(path.read_bytes().replace(b"beta.patch\n", b"") + (b"" if what == "series" else b"\n"))
    assert "lock" in project.apply(code=3).err


@pytest.mark.parametrize("text", ["", "tag = 1 2", 'tag = "v1.2.3"\n'])
def test_a_bad_base_toml(project, text):
    (project.folder() / "base.toml").write_text(text)
    assert "base.toml" in project.apply(code=2).err


# ---- sources


def repin(project, extra: list) -> None:
    """Replace the sdist by one with extra members, and pin its hash: the extraction check is what must fire."""
    sha = write_sdist(project.sdist(), TAG[1:], upstream_files(), project.commit_of()[:9], extra)
    toml = project.folder() / "base.toml"
    toml.write_text(re.sub(r'(sdist_sha256 = ")[0-9a-f]+', rf"\g<1>{sha}", toml.read_text()))
    shutil.rmtree(project.cache)


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b"evil") -> tuple:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data if kind == tarfile.REGTYPE else None


TOP = f"vllm-{TAG[1:]}"
MEMBERS = {
    "dots": member(f"{TOP}/../../evil"), "absolute": member("/tmp/evil"), "other top": member("other/evil"), "git folder": member(f"{TOP}/.git/config"), "dot": member(f"{TOP}/./x"),
    "symbolic link": member(f"{TOP}/l", tarfile.SYMTYPE, "/etc"), "hard link": member(f"{TOP}/l", tarfile.LNKTYPE, f"{TOP}/README.md"), "hard link outside": member(f"{TOP}/l", tarfile.LNKTYPE, "/etc/passwd"),
    "device": member(f"{TOP}/d", tarfile.CHRTYPE), "block device": member(f"{TOP}/d", tarfile.BLKTYPE), "pipe": member(f"{TOP}/p", tarfile.FIFOTYPE), "line end": member(f"{TOP}/a\nb"), "backslash": member(f"{TOP}/a\\b"),
    "git folder in capitals": member(f"{TOP}/sub/.GIT/hooks/x"), "there twice": member(f"{TOP}/README.md"), "a file that is a folder": member(f"{TOP}/vllm"), "a folder that is a file": member(f"{TOP}/README.md/x"),
    "the top is a file": member(TOP), "holes": member(f"{TOP}/s", tarfile.GNUTYPE_SPARSE, data=b""), "contiguous twice": member(f"{TOP}/setup.py", tarfile.CONTTYPE),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_an_sdist_that_leaves_its_folder(project, name):
    repin(project, [MEMBERS[name]])
    done = project.apply("--source", project.sdist(), code=3, timeout=30)
    assert "member" in done.err and not project.tree.exists()
    assert project.leftovers() == [] and list(project.cache.glob("bases/*")) == []


class Zeros(io.RawIOBase):
    """That many zero bytes."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = min(size, self.left) if size >= 0 else self.left
        self.left -= size
        return bytes(size)


def bomb(project, kind: str) -> None:
    """Replace the sdist by one of a few hundred kilobytes that unpacks to gigabytes, and pin it."""
    with gzip.open(project.sdist(), "wb", compresslevel=1) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if kind == "one large file":
            info = tarfile.TarInfo(f"{TOP}/large")
            info.size = 100 << 20
            archive.addfile(info, Zeros(info.size))
        elif kind == "many large files":
            for number in range(20):
                info = tarfile.TarInfo(f"{TOP}/large-{number}")
                info.size = 60 << 20
                archive.addfile(info, Zeros(info.size))
        elif kind == "many files":
            for number in range(60_000):
                archive.addfile(tarfile.TarInfo(f"{TOP}/f{number}"))
        elif kind == "a large header":
            info = tarfile.TarInfo("././@PaxHeader")
            info.type, info.size = tarfile.XHDTYPE, 100 << 20
            archive.addfile(info, Zeros(info.size))
        else:
            info = tarfile.TarInfo(f"{TOP}/claims")
            info.size = 1 << 60
            stream.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    sha = hashlib.sha256(project.sdist().read_bytes()).hexdigest()
    toml = project.folder() / "base.toml"
    toml.write_text(re.sub(r'(sdist_sha256 = ")[0-9a-f]+', rf"\g<1>{sha}", toml.read_text()))
    shutil.rmtree(project.cache)


@pytest.mark.parametrize("kind", ["one large file", "many large files", "many files", "a large header", "a size that is not true"])
def test_an_sdist_that_would_fill_memory_or_disk(project, kind):
    bomb(project, kind)
    done = project.apply("--source", project.sdist(), code=3, prefix=("sh", "-c", 'ulimit -v 1500000; exec "$@"', "sh"))
    assert project.sdist().name in done.err and "next:" in done.err and "Traceback" not in done.err
    assert not project.tree.exists() and project.leftovers() == [] and list(project.cache.glob("bases/*")) == []


def test_names_that_differ_in_case_only_stay_two_files(project):
    extra = [member(f"{TOP}/readme.md", data=b"small\n"), member(f"{TOP}/vllm/ENVS.py", data=b"large\n")]
    repin(project, extra)
    project.apply("--source", project.sdist(), "--json")
    assert (project.tree / "readme.md").read_bytes() == b"small\n" and (project.tree / "vllm/ENVS.py").read_bytes() == b"large\n"
    assert (project.tree / "README.md").read_bytes() == upstream_files()["README.md"]
    assert git(project.tree, "status", "--porcelain") == ""
    project.run("unapply", project.tree)


def test_a_member_whose_name_is_not_utf_8(project):
    name = os.fsdecode(b"vllm/caf\xe9.py")
    repin(project, [member(f"{TOP}/{name}", data=b"x = 1\n")])
    project.apply("--source", project.sdist())
    assert os.path.exists(os.path.join(os.fsencode(project.tree), b"vllm/caf\xe9.py"))
    assert project.run("status", project.tree, "--json").json["state"] == "applied"
    with open(os.path.join(os.fsencode(project.tree), b"vllm/caf\xe9.py"), "ab") as f:
        f.write(b"y = 2\n")
    for locale in ("C", "en_US.UTF-8", "C.UTF-8"):
        assert project.run("status", project.tree, code=1, env={"LC_ALL": locale, "PYTHONUTF8": "0"}).out.startswith("modified")


def test_a_tree_whose_own_name_is_not_utf_8(project):
    tree = os.path.join(os.fsencode(project.room / "work"), b"tr\xe9e")
    project.apply(dest=os.fsdecode(tree))
    for command in (("status", os.fsdecode(tree)), ("verify", os.fsdecode(tree)), ("unapply", os.fsdecode(tree)), ("apply", "--dest", os.fsdecode(tree))):
        project.run(*command, env={"PYTHONIOENCODING": "utf-8:strict"})
        project.run(command[0], *command[1:], "--json")


def test_export_subst_is_another_text_in_an_archive(project):
    """`git archive` writes the commit into such a file: the tree is upstream's by what the stack touches."""
    clone = project.clone()
    fake.commit(clone, {".gitattributes": b"archival.txt export-subst\n", "archival.txt": b"node: $Format:%H$\n"}, "x\n")
    assert project.run("status", clone, "--json").json["state"] == "unapplied"
    project.apply(dest=clone)
    project.run("unapply", clone)
    assert (clone / "archival.txt").read_bytes() == b"node: $Format:%H$\n" and git(clone, "status", "--porcelain") == ""
    (project.room / "archive").mkdir()
    data = subprocess.run(["git", "-C", str(clone), "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(project.room / "archive")], input=data, check=True)
    assert b"Format" not in (project.room / "archive/archival.txt").read_bytes()
    assert project.apply("--source", project.room / "archive", "--json").json["level"] == "touched"
    assert (project.tree / "archival.txt").read_bytes() == (project.room / "archive/archival.txt").read_bytes()
    assert project.run("status", project.tree, "--json").json["state"] == "applied"


def test_an_sdist_of_another_commit(project):
    sha = write_sdist(project.sdist(), TAG[1:], upstream_files(), "123456789")
    toml = project.folder() / "base.toml"
    toml.write_text(re.sub(r'(sdist_sha256 = ")[0-9a-f]+', rf"\g<1>{sha}", toml.read_text()))
    done = project.apply("--source", project.sdist(), code=3)
    assert "123456789" in done.err and project.commit_of()[:9] in done.err


@pytest.mark.parametrize("source", ["file", "pypi"])
def test_an_sdist_with_another_hash(project, source):
    shutil.rmtree(project.cache)
    project.sdist().write_bytes(project.sdist().read_bytes() + b"\0")
    done = project.apply("--source", project.sdist() if source == "file" else "pypi", code=3)
    assert re.search(r"[0-9a-f]{64}", done.err) and not project.tree.exists() and project.leftovers() == []
    assert project.apply(code=3).code == 3  # auto does not go on to git: another file under the same name is no outage


def test_not_an_archive(project):
    project.sdist().write_bytes(b"not a tar\n" * 100)
    sha = hashlib.sha256(project.sdist().read_bytes()).hexdigest()
    toml = project.folder() / "base.toml"
    toml.write_text(re.sub(r'(sdist_sha256 = ")[0-9a-f]+', rf"\g<1>{sha}", toml.read_text()))
    done = project.apply("--source", project.sdist(), code=3)
    assert project.sdist().name in done.err


def test_a_truncated_download_is_fetched_again(project):
    shutil.rmtree(project.cache / "bases")
    kept = project.cache / "downloads" / project.sdist().name
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(project.sdist().read_bytes()[:500])
    assert "damaged" in project.apply().err
    assert kept.read_bytes() == project.sdist().read_bytes()


@pytest.mark.parametrize("victim", ["*.pack", "*.idx", "pack-sizes", "refs", "HEAD"])
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_cache_is_made_again(project, victim, damage):
    repository = next((project.cache / "bases").glob(f"{TAG}-sdist-*.git"))
    for path in list(repository.rglob(victim)):
        if path.is_dir():
            for file in [p for p in path.rglob("*") if p.is_file()]:
                file.write_bytes(b"") if damage == "truncated" else file.unlink()
        else:
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) if damage == "truncated" else path.unlink()
    project.apply()
    assert {k: v for k, v in snapshot(project.tree).items() if k != "vllm/_version.py"} == expected(patched_files())
    assert git(project.tree, "fsck", "--no-dangling") == ""


def test_a_tag_that_moved(project):
    git(project.upstream, "tag", "-f", TAG, OLD)
    for source in (project.upstream, f"file://{project.upstream}", "git"):
        done = project.apply("--source", source, code=3)
        assert "moved" in done.err and project.commit_of(OLD) in done.err and not project.tree.exists()


def test_no_network_and_no_cache(project):
    shutil.rmtree(project.cache)
    shutil.rmtree(project.index)
    shutil.rmtree(project.upstream)
    done = project.apply(code=5)
    assert "pip could not download" in done.err and "git could not fetch" in done.err and "next:" in done.err and "--source" in done.err
    assert project.apply("--source", "pypi", code=5).code == project.apply("--source", "git", code=5).code == 5
    assert project.apply("--json", code=5).json["error"]["exit_code"] == 5
    assert project.leftovers() == []


@pytest.mark.parametrize("source", ["nonsense", "/nonexistent/path", "file:///nonexistent", "empty", "not vllm"])
def test_sources_that_are_none(project, source):
    (project.room / "empty").mkdir()
    (project.room / "not vllm").mkdir()
    (project.room / "not vllm" / "x").write_text("x")
    done = project.apply("--source", source, code=None)
    assert done.code == {"nonsense": 2, "/nonexistent/path": 2, "file:///nonexistent": 5}.get(source, 3), done
    assert "Traceback" not in done.err


def test_a_directory_with_odd_names(project):
    """A plain directory may hold anything: names with line ends, quotes, no UTF-8; links and pipes are left out."""
    source = project.room / "source"
    with tarfile.open(fileobj=io.BytesIO(project.sdist().read_bytes())) as archive:
        archive.extractall(source, filter="data")
    tree = source / TOP
    for name in (b"a\nb", b'"q"', b"\xff\xfe", b" s ", b"back\\slash"):
        with open(os.path.join(os.fsencode(tree), name), "wb") as f:
            f.write(name)
    os.mkfifo(tree / "pipe")
    (tree / "loop").symlink_to(".")
    project.apply("--source", tree)
    assert {k for k in os.listdir(os.fsencode(project.tree))} >= {b"a\nb", b'"q"', b"\xff\xfe", b" s ", b"back\\slash"}
    assert not (project.tree / "pipe").exists()


def test_a_lock_file_of_another_git(project):
    clone = project.clone()
    (clone / ".git/index.lock").write_text("")
    before = snapshot(clone)
    done = project.apply(dest=clone, code=3)
    assert "index.lock" in done.err and snapshot(clone) == before


# ---- git, terminal, JSON


@pytest.mark.parametrize("said,code", [("git version 2.38.1", 3), ("git version 1.9", 3), ("git version 2.39.0", 0), ("git version 2.39.3 (Apple Git-146)", 0), ("git version 3.0.1.windows.1", 0), ("what", 3)])
def test_the_version_of_git(project, said, code):
    folder = project.room / "bin"
    folder.mkdir()
    real = shutil.which("git")
    (folder / "git").write_text(f'#!/bin/sh\nfor a in "$@"; do [ "$a" = version ] && {{ echo "{said}"; exit 0; }}; done\nexec {real} "$@"\n')
    (folder / "git").chmod(0o755)
    done = project.apply(code=code, env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
    assert code == 0 or ("2.39" in done.err and not project.tree.exists())


def test_without_git(project):
    (project.room / "bin").mkdir()
    done = project.apply(code=3, env={"PATH": str(project.room / "bin")})
    assert "git is not installed" in done.err


def test_json_everywhere(applied):
    commands = [("apply", "--dest", applied.tree), ("status", applied.tree), ("verify", applied.tree), ("export", applied.tree), ("lint",), ("bases",), ("unapply", applied.tree)]
    for command in commands:
        done = applied.run(*command, "--json")
        assert done.json["schema"] == 1 and done.json["command"] == command[0]
    for command in [("apply", "--dest", applied.tree, "--ref", "v9"), ("status", "/nonexistent"), ("verify", "/nonexistent"), ("export", "/nonexistent"), ("unapply", "/nonexistent")]:
        done = applied.run(*command, "--json", code=None)
        error = done.json["error"]
        assert done.json["schema"] == 1 and error["exit_code"] == done.code in (2, 3) and error["message"] and error["next"], (command, done)
    shutil.rmtree(applied.root / "patches")
    done = applied.run("lint", "--json", code=None)
    assert done.code in (2, 3) and done.json["error"]


@pytest.mark.parametrize("environment,colour", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_only(applied, environment, colour):
    leader, follower = pty.openpty()
    env = applied.environment(**({"TERM": "xterm", "NO_COLOR": None} | environment))
    subprocess.run([sys.executable, str(applied.root / "apply.py"), "status", str(applied.tree)], env=env, stdout=follower, stderr=follower, stdin=follower, check=True)
    os.close(follower)
    said = os.read(leader, 65536)
    os.close(leader)
    assert (b"\x1b[" in said) == colour
    for command in (("status", applied.tree), ("-v", "x"), ("lint",)):
        done = applied.run(*command, code=None)
        assert "\x1b" not in done.out + done.err


def test_verbose_shows_the_git_commands(project):
    assert "+ git mailinfo" in project.apply("-v").err
