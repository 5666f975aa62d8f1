# SPDX-License-Identifier: Apache-2.0
"""`export`: edited commits back to patch files, unchanged ones byte for byte, a proven round trip or nothing."""
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st

from . import project as fake
from .project import OVERLAY, OVERLAY_PATH, TAG, TOPICS, commit, git, message, snapshot, write_files


def rebase(tree, todo: str) -> None:
    """An interactive rebase of the whole stack with the given `sed` script on the list of commits."""
    git(tree, "rebase", "--quiet", "-i", "refs/patchstack/base", env={"GIT_SEQUENCE_EDITOR": f"sed -i -e '{todo}'"})


def amend(tree, topic: str, edits: dict[str, bytes]) -> None:
    """Change the commit of a topic, as a maintainer would: fixup and autosquash."""
    target = git(tree, "log", "-1", "--format=%H", f"--grep=^Topic: {topic}$")
    write_files(tree, edits)
    git(tree, "add", "-A", "-f", "--", *edits)
    git(tree, "commit", "--quiet", f"--fixup={target}")
    git(tree, "rebase", "--quiet", "-i", "--autosquash", "refs/patchstack/base")


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def round_trip(project, name: str = "again") -> None:
    """A fresh apply of what was exported gives the edited tree."""
    project.apply(dest=project.room / name)
    assert snapshot(project.room / name) == snapshot(project.tree)


def test_nothing_to_export(applied):
    before = {p: p.stat().st_mtime_ns for p in applied.root.rglob("*")}
    assert applied.run("export", applied.tree).out.startswith("nothing to export")
    assert {p: p.stat().st_mtime_ns for p in applied.root.rglob("*")} == before


@pytest.mark.parametrize("topic,path", [("alpha", "vllm/distributed/parallel_state.py"), ("beta", "vllm/envs.py"), ("gamma", "vllm/gamma.py")])
def test_only_the_edited_patch_changes(applied, topic, path):
    before = applied.patches()
    amend(applied.tree, topic, {path: (applied.tree / path).read_bytes() + b"# edited\n"})
    done = applied.run("export", applied.tree, "--json").json
    assert (done["changed"], done["new"], done["dropped"]) == ([topic], [], [])
    assert changed(before, applied.patches()) == {f"{topic}.patch", "lock.json"}
    round_trip(applied)
    assert applied.run("status", applied.tree, "--json").json["state"] == "applied"


def test_only_the_message_changes(applied):
    before = applied.patches()
    git(applied.tree, "commit", "--quiet", "--amend", "-m", message("gamma", "[Misc] Another subject"))
    applied.run("export", applied.tree)
    assert changed(before, applied.patches()) == {"gamma.patch", "lock.json"}
    assert b"Subject: [PATCH] [Misc] Another subject\n" in applied.patches()["gamma.patch"]


def test_an_earlier_edit_that_moves_lines_leaves_later_files_alone(applied):
    """The second patch of the same file applies at an offset: its bytes stay."""
    envs = (applied.tree / "vllm/envs.py").read_bytes()
    commit(applied.tree, {"vllm/envs.py": envs + b"LAST = 1\n"}, message("delta", "[Core] Delta"))
    applied.run("export", applied.tree)
    before = applied.patches()
    commit(applied.tree, {"vllm/envs.py": envs.replace(b"import os\n", b"import os\nimport re\n") + b"LAST = 1\n"}, "fixup! [Core] A flag \u2013 with a dash\n")
    git(applied.tree, "rebase", "--quiet", "-i", "--autosquash", "refs/patchstack/base")
    applied.run("export", applied.tree)
    assert changed(before, applied.patches()) == {"beta.patch", "lock.json"}
    round_trip(applied)


def test_a_new_topic(applied):
    before = applied.patches()
    commit(applied.tree, {"README.md": b"# new\n"}, message("delta-1.x", "[Doc] Delta"))
    assert applied.run("export", applied.tree, "--json").json["new"] == ["delta-1.x"]
    assert changed(before, applied.patches()) == {"delta-1.x.patch", "lock.json", "series"}
    assert applied.patches()["series"].decode().split() == [f"{t}.patch" for t in (*TOPICS, "delta-1.x")]
    round_trip(applied)


def test_a_reorder(applied):
    before = applied.patches()
    rebase(applied.tree, "3{h;d};4{G}")  # overlay, alpha, gamma, beta
    applied.run("export", applied.tree)
    assert applied.patches()["series"] == b"alpha.patch\ngamma.patch\nbeta.patch\n"
    assert changed(before, applied.patches()) == {"series", "lock.json"}
    round_trip(applied)


SERIES = """\
# first comment

# about alpha
alpha.patch
part alpha-inner alpha
# about beta,
# two lines
beta.patch
upstream old-thing v0.1.0 vllm-project/vllm#2
n/a other no such backend
gamma.patch
# the end
"""


def test_comments_and_states_of_the_series_stay(applied):
    path = applied.folder() / "series"
    path.write_text(SERIES)
    assert "nothing to export" in applied.run("export", applied.tree).out
    commit(applied.tree, {"README.md": b"# new\n"}, message("delta", "[Doc] Delta"))
    applied.run("export", applied.tree)
    assert path.read_text().replace("delta.patch\n", "") == SERIES
    assert path.read_text().split().index("delta.patch") > path.read_text().split().index("gamma.patch")


def test_a_part_stays_below_its_topic_when_the_order_changes(applied):
    """`part` names a patch above it: a reorder must not move it away."""
    path = applied.folder() / "series"
    path.write_text("# top\nalpha.patch\npart alpha-inner alpha\nbeta.patch\n# g\ngamma.patch\n")
    rebase(applied.tree, "2{h;d};3{G}")  # overlay, beta, alpha, gamma
    applied.run("export", applied.tree)
    text = path.read_text()
    assert text.index("beta.patch") < text.index("alpha.patch") < text.index("part alpha-inner alpha") < text.index("gamma.patch")
    assert "# top" in text and "# g" in text
    round_trip(applied)


def test_a_drop_needs_to_be_allowed(applied):
    before = applied.patches()
    git(applied.tree, "reset", "--quiet", "--hard", "HEAD~1")
    done = applied.run("export", applied.tree, code=3)
    assert "gamma" in done.err and "--allow-drop" in done.err and applied.patches() == before
    assert applied.run("export", applied.tree, "--allow-drop", "--json").json["dropped"] == ["gamma"]
    assert changed(before, applied.patches()) == {"gamma.patch", "series", "lock.json"}
    round_trip(applied)


def test_the_last_topic_may_go(applied):
    (applied.folder() / "series").write_text("alpha.patch\npart a alpha\nbeta.patch\ngamma.patch\n")
    git(applied.tree, "reset", "--quiet", "--hard", "HEAD~3")
    applied.run("export", applied.tree, code=3)
    applied.run("export", applied.tree, "--allow-drop")
    assert ".patch" not in applied.patches()["series"].decode() and [n for n in applied.patches() if n.endswith(".patch")] == []
    round_trip(applied)


REFUSED = {
    "fixup": (lambda t: commit(t, {"README.md": b"x\n"}, "fixup! [Misc] A new file, and one less\n"), "autosquash"),
    "no topic": (lambda t: commit(t, {"README.md": b"x\n"}, "[Doc] No trailer\n"), "Topic"),
    "bad topic": (lambda t: commit(t, {"README.md": b"x\n"}, message("../Evil", "[Doc] Evil")), "Topic"),
    "same topic twice": (lambda t: commit(t, {"README.md": b"x\n"}, message("alpha", "[Doc] Alpha again")), "squash"),
    "merge": (lambda t: merge(t), "merge commit"),
    "dirty": (lambda t: write_files(t, {"README.md": b"x\n"}), "README.md"),
    "overlay in a patch": (lambda t: commit(t, {OVERLAY_PATH: b"x = 1\n"}, message("delta", "[Doc] Delta")), OVERLAY_PATH),
    "upstream file in the overlay": (lambda t: commit(t, {"README.md": b"x\n"}, message("overlay", "[Overlay] Edit")), "README.md"),
    "not on the base": (lambda t: git(t, "checkout", "--quiet", "--orphan", "lost") or git(t, "commit", "-qm", "lost"), "base"),
    "symbolic link": (lambda t: link(t), "symbolic"),
    "binary": (lambda t: commit(t, {"data.bin": b"\0\1\2\0"}, message("delta", "[Doc] Delta")), "binary"),
    "overlay mode": (lambda t: mode(t), OVERLAY_PATH),
}  # fmt: skip


def merge(tree) -> None:
    git(tree, "checkout", "--quiet", "-b", "side", "HEAD~1")
    commit(tree, {"README.md": b"side\n"}, message("delta", "[Doc] Delta"))
    git(tree, "checkout", "--quiet", "dcp-stack")
    git(tree, "merge", "--quiet", "--no-edit", "side")


def link(tree) -> None:
    (tree / "evil").symlink_to("/etc/passwd")
    git(tree, "add", "evil")
    git(tree, "commit", "-qm", message("delta", "[Doc] Delta"))


def mode(tree) -> None:
    (tree / OVERLAY_PATH).chmod(0o755)
    git(tree, "commit", "-qam", message("overlay", "[Overlay] Mode"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_written(applied, name):
    make, said = REFUSED[name]
    make(applied.tree)
    before = snapshot(applied.root)
    done = applied.run("export", applied.tree, code=3)
    assert said.lower() in done.err.lower() and "next:" in done.err
    assert snapshot(applied.root) == before and applied.leftovers() == []


def test_dry_run_writes_nothing(applied):
    commit(applied.tree, {"README.md": b"x\n"}, message("delta", "[Doc] Delta"))
    before = snapshot(applied.root)
    assert applied.run("export", applied.tree, "--dry-run", "--json").json["new"] == ["delta"]
    assert snapshot(applied.root) == before


def test_an_overlay_file_edited(applied):
    before = applied.patches()
    text = OVERLAY[OVERLAY_PATH] + b"\n\ndef more():\n    return 1\n"
    commit(applied.tree, {OVERLAY_PATH: text}, message("overlay", "[Overlay] More"))
    assert applied.run("export", applied.tree, "--json").json["overlay_changed"] == [OVERLAY_PATH]
    assert (applied.root / "vllm_overlay" / OVERLAY_PATH).read_bytes() == text
    assert changed(before, applied.patches()) == {"lock.json"}
    round_trip(applied)


def test_the_overlay_edited_in_its_commit(applied):
    text = OVERLAY[OVERLAY_PATH] + b"# edited\n"
    amend(applied.tree, "overlay", {OVERLAY_PATH: text})
    before = applied.patches()
    applied.run("export", applied.tree)
    assert changed(before, applied.patches()) == {"lock.json"}
    assert (applied.root / "vllm_overlay" / OVERLAY_PATH).read_bytes() == text


KINDS = {
    "crlf": {"vllm/crlf.py": fake.FILES["vllm/crlf.py"].replace(b"C = 3\r\n", b"C = 3\r\nD = 4\r\n")},
    "crlf to lf": {"vllm/crlf.py": fake.FILES["vllm/crlf.py"].replace(b"\r\n", b"\n")},
    "mixed line ends": {"vllm/crlf.py": b"A = 1\nB = 2\r\nC = 3\r"},
    "newline at the end added": {"vllm/no_newline.py": b"X = 1\nY = 2\n"},
    "newline at the end removed": {"README.md": b"# vLLM, a small fake"},
    "new file": {"vllm/sub dir/n\u00e9w.py": b"N = 1\n"},
    "new empty file": {"vllm/empty/__init__.py": b""},
    "file emptied": {"README.md": b""},
    "deleted": {"docs/\u00fcn\u00efcode.md": None},
    "deleted empty file": {"vllm/distributed/__init__.py": None},
    "tracked but ignored": {"results/kept.log": b"edited\n"},
    "new ignored file": {"results/new.log": b"new\n"},
    "latin-1": {"vllm/latin1.txt": b"caf\xe9 \xff\n"},
    "trailing white space": {"README.md": b"a \t\n\n \n\x0c\n"},
    "lines that look like a patch": {"README.md": b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-- \n2.39\ndiff --git a/x b/x\nFrom 0 Mon\n"},
    "odd names": {'a "quoted" name.md': b"1\n", "a/b -> c": b"2\n", " leading and trailing ": b"3\n", "b/b/b": b"4\n"},
    "control character": {"a\ttab.md": b"1\n"},
    "unicode line separators": {"README.md": "a\u2028b\u0085c\x0bd\x1ce\n".encode()},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_change(applied, kind):
    base = applied.patches()
    commit(applied.tree, KINDS[kind], message("delta", "[Doc] Delta"))
    if "\t" in "".join(KINDS[kind]):
        assert "control character" in applied.run("export", applied.tree, code=3).err
        assert applied.patches() == base
        return
    applied.run("export", applied.tree)
    assert changed(base, applied.patches()) == {"delta.patch", "series", "lock.json"}
    round_trip(applied)
    assert "nothing to export" in applied.run("export", applied.room / "again").out
    applied.run("unapply", applied.tree)


@pytest.mark.parametrize("path", ["README.md", "tools/run.sh"])
@pytest.mark.parametrize("content", [None, b"edited\n"])
def test_mode_changes(applied, path, content):
    (applied.tree / path).chmod(0o644 if path == "tools/run.sh" else 0o755)
    if content:
        (applied.tree / path).write_bytes(content)
    git(applied.tree, "commit", "-qam", message("delta", "[Doc] Delta"))
    applied.run("export", applied.tree)
    round_trip(applied)


def test_a_rename_is_written_out(applied):
    git(applied.tree, "mv", "vllm/latin1.txt", "vllm/other.txt")
    git(applied.tree, "commit", "-qm", message("delta", "[Doc] Delta"))
    applied.run("export", applied.tree)
    assert b"rename" not in applied.patches()["delta.patch"]
    round_trip(applied)


def test_a_base_from_git_and_from_the_sdist_export_the_same(project):
    for source, name in (("git", "a"), ("pypi", "b")):
        tree = project.room / name
        project.apply("--source", source, dest=tree)
        commit(tree, {"README.md": b"x\n"}, message("delta", "[Doc] Delta"))
    kept = project.root
    found = []
    for name in "ab":
        project.root = project.room / f"project-{name}"
        shutil.copytree(kept, project.root)
        project.run("export", project.room / name)
        found.append(project.patches())
    assert found[0] == found[1]


def test_export_from_another_base_is_refused(applied):
    assert TAG in applied.run("export", applied.tree, "--base", fake.OLD, code=3).err
    applied.run("export", applied.tree, "--base", "v9.9.9", code=2)
    assert "--base" in applied.run("export", applied.clone(), code=2).err


LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"a\r\n", b"  \n", b"\n", b"-x\n", b"+y\n", b"\\ No newline at end of file\n", b"@@ -1 +1 @@\n", b"\xff\n", b"-- \n"]), max_size=8)
CONTENT = st.one_of(st.none(), st.builds(lambda lines, end: b"".join(lines) + end, LINES, st.sampled_from([b"", b"z", b"\r"])))
PATHS = st.sampled_from(["README.md", "vllm/crlf.py", "vllm/no_newline.py", "vllm/new.py", "docs/a file.md", "docs/\u00fcn\u00efcode.md", "n\u00e9w/x y"])
COMMITS = st.lists(st.dictionaries(PATHS, CONTENT, min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def workshop(template, tmp_path_factory):
    project = fake.copy_of(template, tmp_path_factory.mktemp("property") / "room")
    project.apply()
    git(project.tree, "update-ref", "refs/keep/start", "HEAD")
    shutil.copytree(project.root, project.room / "pristine")
    return project


@hypothesis.given(commits=COMMITS)
@hypothesis.settings(max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), derandomize=True)
def test_apply_after_export_is_the_identity(workshop, commits):
    project = workshop
    shutil.rmtree(project.root)
    shutil.copytree(project.room / "pristine", project.root)
    tree = project.tree
    git(tree, "checkout", "--quiet", "--force", "-B", "dcp-stack", "refs/keep/start")
    git(tree, "clean", "-qfd")
    git(tree, "update-ref", "refs/patchstack/applied", "HEAD")
    made = 0
    for number, edits in enumerate(commits):
        edits = {p: d for p, d in edits.items() if (d is not None or (tree / p).exists())}
        write_files(tree, edits)
        for path in edits:
            git(tree, "add", "-A", "-f", "--", path)
        if git(tree, "diff", "--cached", "--name-only"):
            git(tree, "commit", "--quiet", "-m", message(f"t{number}", f"[T] {number}"))
            made += 1
    project.run("export", tree)
    shutil.rmtree(project.room / "again", ignore_errors=True)
    project.apply(dest=project.room / "again")
    assert snapshot(project.room / "again") == snapshot(tree)
    assert len([n for n in project.patches() if n.endswith(".patch")]) == 3 + made
    assert "nothing to export" in project.run("export", project.room / "again").out
