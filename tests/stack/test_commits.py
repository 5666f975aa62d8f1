# SPDX-License-Identifier: Apache-2.0
"""The commits that `apply` makes are git's own: `git am --keep-non-patch --committer-date-is-author-date` is the oracle."""
import pytest

from .project import OVERLAY, OVERLAY_PATH, TOPICS, commit, expected, git, message, patched_files, snapshot

IDENTITY = {"GIT_COMMITTER_NAME": "vllm-dcp-stack", "GIT_COMMITTER_EMAIL": "stack@vllm-dcp-stack.invalid"}


def test_same_commits_as_git_am(project):
    clone = project.clone()
    project.apply("--source", clone)
    ours = git(project.tree, "log", "--reverse", "--format=%H %s", "refs/patchstack/base..HEAD").splitlines()
    overlay = ours[0].split(" ")[0]
    assert git(project.tree, "diff", "--name-status", f"{overlay}~1", overlay) == f"A\t{OVERLAY_PATH}"
    assert git(project.tree, "show", f"{overlay}:{OVERLAY_PATH}").encode() + b"\n" == OVERLAY[OVERLAY_PATH]
    git(clone, "fetch", "--quiet", str(project.tree), "dcp-stack")
    git(clone, "checkout", "--quiet", "--detach", overlay)
    paths = [str(project.folder() / f"{t}.patch") for t in TOPICS]
    git(clone, "am", "--quiet", "--keep-non-patch", "--keep-cr", "--committer-date-is-author-date", *paths, env=IDENTITY)
    by_am = git(clone, "log", "--reverse", "--format=%H %s", f"{overlay}..HEAD").splitlines()
    assert by_am == ours[1:]
    assert [line.split(" ", 1)[1] for line in by_am][:2] == ["[Bugfix][Kernel] Remember the world size of a group", "[Core] A flag \u2013 with a dash"]


def test_the_tree_after_each_patch(applied):
    for number in range(len(TOPICS) + 1):
        git(applied.tree, "checkout", "--quiet", "--detach", f"dcp-stack~{len(TOPICS) - number}")
        found = {k: v for k, v in snapshot(applied.tree).items() if k != "vllm/_version.py"}
        assert found == expected(patched_files(number) | OVERLAY)


def test_authors_and_dates_are_the_patch_s(applied):
    shown = git(applied.tree, "log", "--reverse", "--format=%an|%ae|%aI|%cn|%cI", "refs/patchstack/base..HEAD").splitlines()
    assert shown[2] == "Zo\u00eb \u00dcn\u00efcode|zoe@x.invalid|2026-01-01T21:40:00+01:00|vllm-dcp-stack|2026-01-01T21:40:00+01:00"


SURROUNDINGS = [
    {"TZ": "Asia/Kolkata", "LC_ALL": "C", "LANG": "C", "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z", "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z"},
    {"TZ": "America/St_Johns", "LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR.UTF-8", "LANGUAGE": "fr", "EMAIL": "me@y.invalid", "SOURCE_DATE_EPOCH": "1"},
    {"TZ": "UTC", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]  # fmt: skip


def test_two_days_time_zones_and_locales_give_the_same_commits(project):
    found = set()
    for number, surroundings in enumerate(SURROUNDINGS):
        dest = project.room / f"tree{number}"
        found.add(project.apply("--json", dest=dest, env=surroundings).json["commit"])
        found.add(git(dest, "rev-parse", "HEAD"))
    assert len(found) == 1


def test_no_commit_carries_the_present_time(project):
    """git takes `now` where no date is given."""
    project.apply()
    dates = git(project.tree, "log", "--format=%ct %at", "HEAD").split()
    assert max(map(int, dates)) <= 1767300000  # none is of today


@pytest.mark.parametrize("body", ["-- \nsignature", "--", "a\n---x", "diff of opinion", "Signed off: nobody", "From here on", ">From quoted", "[a] bracket", "\u2013 \u00fc"])
def test_harmless_message_lines_survive(applied, body):
    text = message("delta", "[CI/Build][Doc] Delta: [WIP] brackets", *body.split("\n"))
    commit(applied.tree, {"README.md": b"delta\n"}, text)
    applied.run("export", applied.tree)
    applied.apply(dest=applied.room / "again")
    assert git(applied.room / "again", "log", "-1", "--format=%B", "HEAD") == text.rstrip("\n").replace("-- \n", "--\n")


@pytest.mark.parametrize("body", ["before\n---\nafter", "diff --git a/x b/x", "Index: x", "diff -u a b", "--- a/x\n+++ b/x", "--- a line of dashes"])
def test_message_lines_that_git_would_cut_at_are_refused(applied, body):
    """mailinfo ends the message there: the trailers behind it would be lost, and with them the topic."""
    commit(applied.tree, {"README.md": b"delta\n"}, message("delta", "[Doc] Delta", *body.split("\n")))
    before = applied.patches()
    done = applied.run("export", applied.tree, code=3)
    assert "delta" in done.err.lower() and "message" in done.err
    assert applied.patches() == before


def test_an_in_body_from_line_does_not_change_the_author(applied):
    text = "[Doc] Delta\n\nFrom: Eve <eve@y.invalid>\n\n" + message("delta", "x").split("\n\n", 1)[1]
    commit(applied.tree, {"README.md": b"delta\n"}, text)
    before = applied.patches()
    if applied.run("export", applied.tree, code=None).code == 0:
        applied.apply(dest=applied.room / "again")
        assert git(applied.room / "again", "log", "-1", "--format=%an %B", "HEAD") == "Ann " + text.rstrip("\n")
    else:
        assert applied.patches() == before
