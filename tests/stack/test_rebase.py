# SPDX-License-Identifier: Apache-2.0
"""`rebase`: carry, stop, resolve, skip, abort; killed at any point and continued; recorded resolutions; the round trip."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from .project import EDITS, FILES, OVERLAY_PATH, REPOSITORY, TAG, TOPICS, Project, commit, copy_of, git, snapshot, upstream_files, write_files
from .releases import CLASH, MOVED, NEAR, NEW, NEWER, STATE, TAKEN, add_patch, digest, killer, make_default, merged, rebase, release, resolve, work_tree
from .test_file_by_file import in_namespace

# What a human makes of CLASH: both functions.
ANSWER = {STATE: CLASH[STATE].replace(b"def get_group():\n", b'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n')}


def carried(project: Project, upstream: dict[str, bytes | None], alpha: dict[str, bytes | None]) -> dict[str, bytes]:
    """The tree that a carry must give: the release, alpha as given, beta, gamma and the overlay, all from the tests' own tables."""
    files = upstream_files() | upstream | alpha
    for topic in ("beta", "gamma"):
        files |= EDITS[topic][2]
    files |= {OVERLAY_PATH: (project.root / "vllm_overlay" / OVERLAY_PATH).read_bytes()}
    return {p: d for p, d in files.items() if d is not None}


def result(project: Project, tag: str = NEW) -> dict[str, bytes]:
    """What `apply` makes of patches/<tag>/ in a new place."""
    tree = project.room / "work" / f"result-{tag}"
    shutil.rmtree(tree, ignore_errors=True)
    project.apply("--ref", tag, dest=tree)
    return {p.removesuffix("*"): d for p, d in snapshot(tree).items() if p != "vllm/_version.py"}


def nothing_left(project: Project) -> bool:
    return project.leftovers() == [] and os.listdir(project.temp) == []


@pytest.mark.parametrize(("edits", "alpha"), [
    ({"docs/notes.md": b"unrelated\n"}, TAKEN),
    (MOVED, {STATE: MOVED[STATE].replace(b"def get_group():\n", b'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n')}),
    (NEAR, {STATE: NEAR[STATE].replace(b"def get_group():\n", b'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n')}),
])  # fmt: skip
def test_what_git_can_merge_is_carried_without_a_stop(project, edits, alpha):
    release(project, edits)
    before = project.patches()
    told = rebase(project, "--to", NEW, "--json").json
    assert (told["schema"], told["state"], told["from"], told["to"]) == (1, "carried", TAG, NEW)
    assert told["topics"] == TOPICS and told["skipped"] == {} and told["retire"] == {} and told["verify"] == []
    assert [line for line in told["range_diff"].splitlines() if line[:2] in ("1:", "2:", "3:", "4:")] and len(told["range_diff"].splitlines()) >= 4
    assert result(project) == carried(project, edits, alpha)
    assert project.patches() == before and project.patches(NEW).keys() == {"base.toml", "series", "lock.json", *(f"{t}.patch" for t in TOPICS)}
    assert nothing_left(project) and project.run("lint").code == 0


def test_the_new_base_is_pinned_and_not_the_default(project):
    commit_id = release(project, MOVED)
    rebase(project, "--to", NEW)
    toml = project.patches(NEW)["base.toml"].decode()
    assert f'tag = "{NEW}"' in toml and f'commit = "{commit_id[:9]}"' in toml and "default = false" in toml and OVERLAY_PATH in toml
    assert {b["tag"]: b["default"] for b in project.run("bases", "--json").json["bases"]} == {"v1.1.0": False, TAG: True, NEW: False}


def test_a_patch_that_makes_the_same_commit_keeps_its_bytes(project):
    """The base differs, so commits differ; the text of a patch that did not move is the same but for the blobs of its index lines."""
    release(project, {"docs/notes.md": b"unrelated\n"})
    rebase(project, "--to", NEW)
    assert {t: project.patches(NEW)[f"{t}.patch"] for t in TOPICS} == {t: project.patches()[f"{t}.patch"] for t in TOPICS}


def test_the_comments_of_the_series_follow_and_the_other_states_stay(project):
    series = project.folder() / "series"
    series.write_text(f"# vLLM {TAG}, the default base. Order matters.\nupstream zeta v1.2.0 vllm-project/vllm#5\n" + series.read_text().replace("beta.patch\n", "beta.patch\npart eta beta\n") + "n/a theta no such thing\n")
    release(project, MOVED)
    rebase(project, "--to", NEW)
    assert project.patches(NEW)["series"].decode().splitlines() == [
        f"# vLLM {NEW}. Order matters.", "upstream zeta v1.2.0 vllm-project/vllm#5", "alpha.patch", "beta.patch", "part eta beta", "gamma.patch", "n/a theta no such thing"]  # fmt: skip


# ---- stops


def test_a_conflict_stops_says_what_to_do_and_goes_on(project):
    release(project, CLASH)
    patches = digest(project.root / "patches")
    done = rebase(project, "--to", NEW, code=4)
    assert "alpha conflicts with v1.3.0" in done.err and f"- {STATE}" in done.err
    assert str(work_tree(project)) in done.err and "rebase --continue" in done.err and "--skip" in done.err and "--abort" in done.err
    assert b"<<<<<<<" in (work_tree(project) / STATE).read_bytes() and digest(project.root / "patches") == patches
    assert "still unresolved" in rebase(project, "--continue", code=4).err
    git(work_tree(project), "add", STATE)
    assert "conflict marker" in rebase(project, "--continue", code=4).err and digest(project.root / "patches") == patches
    resolve(project, ANSWER)
    told = rebase(project, "--continue", "--json").json
    assert told["topics"] == TOPICS and any(line.startswith("2:") and " ! " in line and "Remember the world size" in line for line in told["range_diff"].splitlines())
    assert result(project) == carried(project, CLASH, ANSWER) and nothing_left(project)
    author = git(work_tree(project), "log", "--format=%an <%ae> %s", "HEAD~2", "-1")
    assert author == f"Ann <ann@x.invalid> {EDITS['alpha'][0]}"
    assert "no rebase is in progress" in rebase(project, "--continue", code=2).err


def test_the_json_of_a_stop(project):
    release(project, CLASH)
    told = rebase(project, "--to", NEW, "--json", code=4).json
    assert told["error"]["exit_code"] == 4 and told["error"]["kind"] == "Conflict" and "--continue" in told["error"]["next"]


def test_the_human_may_commit_it_himself(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    git(work_tree(project), "-c", "core.editor=true", "cherry-pick", "--continue")
    rebase(project, "--continue")
    assert result(project) == carried(project, CLASH, ANSWER)


def test_a_resolution_to_nothing_is_proposed_for_retirement(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    resolve(project, CLASH)
    assert "nothing is left" in rebase(project, "--continue", code=4).err
    rebase(project, "--skip", code=1)  # gamma imports what alpha brought
    assert "upstream alpha v1.3.0 unknown" in project.patches(NEW)["series"].decode()


def test_changes_of_no_patch_are_refused_and_kept(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    git(work_tree(project), "-c", "core.editor=true", "cherry-pick", "--continue")
    (work_tree(project) / "README.md").write_text("mine\n")
    for _ in range(2):
        assert "README.md" in rebase(project, "--continue", code=3).err
        assert (work_tree(project) / "README.md").read_text() == "mine\n"
    git(work_tree(project), "checkout", "README.md")
    rebase(project, "--continue")


def test_a_removed_file_says_where_its_code_went(project):
    release(project, {STATE: None, "vllm/distributed/groups.py": b"def init_group(): ...\n\n\ndef get_group(): ...\n", "vllm/distributed/rest.py": b"class Coordinator:\n    def __init__(self, rank, world_size=1): ...\n"})
    done = rebase(project, "--to", NEW, code=4)
    assert "vllm/distributed/groups.py (2)" in done.err and "git rm" in done.err


def test_a_renamed_file_is_followed(project):
    name = "vllm/distributed/group_state.py"
    release(project, {STATE: None, name: FILES[STATE]})
    done = rebase(project, "--to", NEW, code=1)  # what imports the old module does not fit
    assert "vllm.distributed.parallel_state" in done.out
    assert result(project)[name] == TAKEN[STATE] and STATE not in result(project)


def test_a_carry_that_does_not_fit_the_release_is_a_finding(project):
    release(project, {STATE: FILES[STATE].replace(b"def __init__(self, rank: int, world_size: int = 1):", b"def __init__(self, rank: int, size: int = 1):").replace(b"self.world_size = world_size", b"self.world_size = size")})
    done = rebase(project, "--to", NEW, code=1)
    assert f"{OVERLAY_PATH}:" in done.out and "world_size" in done.out and project.patches(NEW)


# ---- retirement


def test_upstream_has_it_stops_and_skip_retires_it_with_the_proof(project):
    add_patch(project, "delta", {"README.md": b"# edited\n"}, trailers={"Upstream-Status": "Submitted [vllm-project/vllm#77]"})
    release(project, merged(TAKEN, {"README.md": b"# edited\n"}))
    done = rebase(project, "--to", NEW, code=4)
    assert "alpha: nothing is left of it on v1.3.0" in done.err and "proof: empty after a 3-way merge" in done.err and "--skip" in done.err
    assert not project.folder(NEW).exists()
    assert "nothing is left" in rebase(project, "--continue", code=4).err  # never dropped silently
    stopped = rebase(project, "--skip", code=4)
    assert "upstream alpha v1.3.0 unknown" in stopped.out and "delta: nothing is left" in stopped.err
    told = rebase(project, "--skip", "--json").json
    assert told["topics"] == ["beta", "gamma"] and told["skipped"]["delta"] == "upstream delta v1.3.0 vllm-project/vllm#77"
    series = project.patches(NEW)["series"].decode().splitlines()
    assert series == ["upstream alpha v1.3.0 unknown", "beta.patch", "gamma.patch", "upstream delta v1.3.0 vllm-project/vllm#77"]
    assert "alpha.patch" not in project.patches(NEW) and "alpha.patch" in project.patches()
    assert result(project) == carried(project, merged(TAKEN, {"README.md": b"# edited\n"}), {})


def test_skip_without_a_sign_is_not_applicable_and_says_why(project):
    series = project.folder() / "series"
    series.write_text(series.read_text().replace("alpha.patch\n", "alpha.patch\npart eta alpha\n"))
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    rebase(project, "--skip", code=1)  # gamma imports what alpha brings
    assert project.patches(NEW)["series"].decode().splitlines()[:2] == [f"n/a alpha left out when the stack was carried to {NEW}", f"n/a eta left out when the stack was carried to {NEW}"]
    assert not (work_tree(project) / ".git/CHERRY_PICK_HEAD").exists()


def test_what_a_patch_declares_is_said_at_the_stop_and_at_the_end(project):
    add_patch(project, "delta", {"README.md": b"# edited\n"}, trailers={"Retire-When": "base >= v1.3"})
    add_patch(project, "eta", {"vllm/latin1.txt": b"eta\n"}, trailers={"Retire-When": "base >= v1.3.0"})
    release(project, {"README.md": b"# theirs\n"})
    assert "it may be time to retire it: declared: Retire-When says base >= v1.3" in rebase(project, "--to", NEW, code=4).err
    told = rebase(project, "--skip", "--json").json
    assert told["skipped"] == {"delta": "upstream delta v1.3.0 unknown"} and told["retire"] == {"eta": ["declared: Retire-When says base >= v1.3.0"]}


def test_skip_without_a_stop_is_refused(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, env=killer(project, "cherry-pick"), code=-9)
    assert "did not stop" in rebase(project, "--skip", code=3).err
    assert "alpha conflicts" in rebase(project, "--continue", code=4).err


# ---- refusals, abort, damaged state


def test_refused_when_one_is_in_progress_or_the_folder_exists(project):
    release(project, CLASH)
    release(project, {"docs/more.md": b"x\n"}, tag=NEWER)
    rebase(project, "--to", NEW, code=4)
    before = digest(project.root)
    for tag in (NEW, NEWER):
        assert "in progress" in rebase(project, "--to", tag, code=3).err
    assert digest(project.root) == before
    rebase(project, "--abort")
    project.folder(NEW).mkdir()
    (project.folder(NEW) / "base.toml").write_text(project.folder().joinpath("base.toml").read_text().replace(TAG, NEW).replace("default = true", "default = false"))
    assert "exists already" in rebase(project, "--to", NEW, code=3, env={"PIP_NO_INDEX": "1"}).err
    assert not work_tree(project).exists()


def test_overlay_collision_is_refused_and_leaves_nothing(project):
    release(project, {OVERLAY_PATH: b"# theirs\n"})
    before = digest(project.root)
    assert OVERLAY_PATH in rebase(project, "--to", NEW, code=3).err
    shutil.rmtree(project.root / "build", ignore_errors=True)
    assert digest(project.root) == before


@pytest.mark.parametrize("command", ["--continue", "--skip", "--abort"])
def test_nothing_in_progress(project, command):
    before = digest(project.root)
    done = rebase(project, command, code=2)
    assert "no rebase is in progress" in done.err and "rebase --to REF" in done.err and digest(project.root) == before


def test_abort_leaves_nothing(project):
    release(project, CLASH)
    before = digest(project.root)
    rebase(project, "--to", NEW, code=4)
    (work_tree(project) / "mine.txt").write_text("untracked")
    assert "forgotten" in rebase(project, "--abort").out
    assert digest(project.root) == before and nothing_left(project)
    assert "alpha conflicts" in rebase(project, "--to", NEW, code=4).err


def test_a_mount_in_its_tree_is_not_removed_with_it(project):
    """Neither by an abort, nor by the next rebase, which replaces the tree of a finished one."""
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    tree, volume = work_tree(project), project.room / "volume"
    write_files(volume, {"precious": b"1\n"})
    (tree / "data").mkdir()
    script = 'mount --bind "$1" "$2/data"; apply rebase --abort || echo "code $?"; rm "$2/.git/state.json"; apply rebase --to "$3" || echo "code $?"; ls "$2/data"'
    done = in_namespace(project, script, volume, tree, NEW)
    assert done.stdout.count("code 3") == 2 and done.stderr.count("something is mounted in") == 2 and "precious" in done.stdout, done
    assert snapshot(volume) == {"precious": b"1\n"}


def test_abort_works_when_the_old_base_is_gone(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    (project.folder() / "base.toml").rename(project.room / "kept")
    rebase(project, "--abort")
    assert not work_tree(project).exists()


@pytest.mark.parametrize("content", ["", '{"schema": 1, "fro', "[]", '{"schema": 1}', "null"])
def test_a_truncated_state_counts_as_absent(project, content):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    (work_tree(project) / ".git/state.json").write_text(content)
    done = rebase(project, "--continue", code=2)
    assert "damaged" in done.err and "no rebase is in progress" in done.err
    assert "alpha conflicts" in rebase(project, "--to", NEW, code=4).err
    resolve(project, ANSWER)
    rebase(project, "--continue")
    assert result(project) == carried(project, CLASH, ANSWER)


@pytest.mark.parametrize(("args", "said"), [(("--to", "v9.9.9"), "v9.9.9"), (("--to", "nonsense"), "neither a release"), (("--continue", "--base", TAG), "--base goes with --to"), (("--continue", "--dry-run"), "--dry-run goes with --to")])
def test_wrong_arguments(project, args, said):
    done = rebase(project, *args, code=5 if "9.9" in args[1] else 2)
    assert said in done.err and not (project.root / "build").exists()


def test_a_release_without_an_sdist_cannot_be_pinned(project):
    release(project, MOVED)
    done = rebase(project, "--to", NEW, env={"VLLM_REPO": str(project.upstream)}, code=3)
    assert not project.folder(NEW).exists() and not work_tree(project).exists() and done.err.count("next:") == 1


# ---- killed


@pytest.mark.parametrize(("which", "count", "when"), [
    ("apply --cached", 1, "before"), ("apply --cached", 3, "after"), ("update-ref", 2, "after"), ("reset --quiet --hard", 1, "before"), ("reset --quiet --hard", 1, "after"),  # while it starts
    ("cherry-pick", 1, "before"), ("cherry-pick", 1, "after"), ("cherry-pick", 1, "torn"), ("cherry-pick", 2, "after"), ("cherry-pick", 3, "torn"),
    ("format-patch", 1, "after"), ("range-diff", 1, "before"),
    ("range-diff", 1, "after"), ("diff-index", 2, "before"),
])  # fmt: skip
def test_killed_and_continued(project, which, count, when):
    """Whatever the point, patches/ is whole or untouched, and --continue (or --to, if it had not begun) gives the same result."""
    release(project, NEAR)
    before = project.patches()
    killed = rebase(project, "--to", NEW, env=killer(project, which, count=count, when=when), code=-9)
    assert killed.code == -signal.SIGKILL and project.patches() == before
    assert not project.folder(NEW).exists() or "lock.json" in project.patches(NEW)
    begun = (work_tree(project) / ".git/state.json").exists()
    assert begun == (which not in ("apply --cached", "update-ref", "reset --quiet --hard"))
    rebase(project, *(("--continue",) if begun else ("--to", NEW)))
    alpha = {STATE: NEAR[STATE].replace(b"def get_group():\n", b'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n')}
    assert result(project) == carried(project, NEAR, alpha)
    assert project.leftovers() == []


@pytest.mark.parametrize(("which", "when"), [("cherry-pick", "after"), ("diff --check", "before"), ("commit --quiet", "before"), ("commit --quiet", "after"), ("log --reverse", "before")])
def test_killed_at_a_conflict_keeps_what_the_human_did(project, which, when):
    release(project, CLASH)
    if which == "cherry-pick":
        rebase(project, "--to", NEW, env=killer(project, which, when=when), code=-9)
        assert "alpha conflicts" in rebase(project, "--continue", code=4).err
        resolve(project, ANSWER)
    else:
        rebase(project, "--to", NEW, code=4)
        resolve(project, ANSWER)
        rebase(project, "--continue", env=killer(project, which, when=when), code=-9)
    if which == "commit --quiet" and when == "after":  # git's own clean-up had not come
        (work_tree(project) / ".git/CHERRY_PICK_HEAD").write_text(git(work_tree(project), "rev-parse", "refs/patchstack/old~2") + "\n")
        (work_tree(project) / ".git/index.lock").touch()
    rebase(project, "--continue")
    assert result(project) == carried(project, CLASH, ANSWER)
    assert git(work_tree(project), "rev-list", "--count", "refs/patchstack/base..HEAD") == "4"


def test_killed_before_the_stop_at_an_empty_commit(project):
    release(project, TAKEN)
    rebase(project, "--to", NEW, env=killer(project, "cherry-pick", when="after"), code=-9)
    assert "alpha: nothing is left" in rebase(project, "--continue", code=4).err
    rebase(project, "--skip")
    assert project.patches(NEW)["series"].decode().startswith("upstream alpha v1.3.0")


def test_killed_while_it_aborts(project):
    release(project, CLASH)
    before = digest(project.root)
    rebase(project, "--to", NEW, code=4)
    stale = project.root / "build" / f".rebase-{NEW}.patchstack-killed"
    (stale / "tree").mkdir(parents=True)
    rebase(project, "--abort")
    assert digest(project.root) == before


def test_killed_at_any_moment(project):
    """By the clock, not by git command: whatever state that gives, the next command reaches the same end."""
    release(project, NEAR)
    chance = random.Random(9)
    env = project.environment()
    args = ["--to", NEW]
    for _ in range(6):
        process = subprocess.Popen([sys.executable, str(project.root / "apply.py"), "rebase", *args], cwd=project.room, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(chance.uniform(0.2, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0:
            break
        args = ["--continue"] if (work_tree(project) / ".git/state.json").exists() else ["--to", NEW]
    else:
        rebase(project, *args)
    assert result(project)[STATE].count(b"def group_size") == 1 and project.patches(NEW).keys() == project.patches().keys()
    assert project.leftovers() == []


# ---- recorded resolutions


def test_a_second_rebase_uses_the_recorded_resolution(project):
    release(project, CLASH)
    release(project, {"docs/more.md": b"x\n"}, tag=NEWER)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    rebase(project, "--continue")
    kept = snapshot(project.root / "rerere")
    assert sorted(p.split("/")[1] for p in kept) == ["postimage", "preimage"]
    told = rebase(project, "--to", NEWER)  # the same conflict: no stop
    assert "alpha: its conflicts are resolved as recorded" in told.err
    assert result(project, NEWER)[STATE] == ANSWER[STATE] and snapshot(project.root / "rerere") == kept
    shutil.rmtree(project.root / "rerere")
    shutil.rmtree(project.folder(NEWER))
    rebase(project, "--to", NEWER, code=4)  # it was the record that helped


def test_an_aborted_rebase_keeps_the_resolutions_made_so_far(project):
    both = merged(CLASH, {"vllm/no_newline.py": b"X = 1\nY = 7"})
    release(project, both)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    assert "beta conflicts" in rebase(project, "--continue", code=4).err
    rebase(project, "--abort")
    assert "beta conflicts" in rebase(project, "--to", NEW, code=4).err  # alpha went through


# ---- round trip


def test_there_and_back_gives_the_same_tree(project, tmp_path):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    rebase(project, "--continue")
    locked = json.loads(project.patches()["lock.json"])
    back = copy_of(project, tmp_path / "back")
    make_default(back, NEW)
    shutil.rmtree(back.folder())
    rebase(back, "--to", TAG, code=4)
    resolve(back, TAKEN, TAG)
    rebase(back, "--continue")
    again = json.loads(back.patches()["lock.json"])
    assert again["result_tree"] == locked["result_tree"] and again["base_tree"] == locked["base_tree"] and again["touched"] == locked["touched"]
    assert [p["post_tree"] for p in again["patches"]] == [p["post_tree"] for p in locked["patches"]]
    assert result(back, TAG) == result(project, TAG)


def test_upstream_lines_of_later_releases_are_not_claimed_for_an_older_one(project):
    series = project.folder() / "series"
    series.write_text("upstream zeta v1.2.0 vllm-project/vllm#5\nupstream eta v1.0.1 vllm-project/vllm#6\n" + series.read_text())
    git(project.upstream, "checkout", "--quiet", TAG)
    release(project, {"docs/notes.md": b"older\n"}, tag="v1.1.5")
    rebase(project, "--to", "v1.1.5")
    assert project.patches("v1.1.5")["series"].decode().splitlines()[:2] == ["n/a zeta upstream has it from v1.2.0 on, by vllm-project/vllm#5", "upstream eta v1.0.1 vllm-project/vllm#6"]


def test_overlay_changes_in_the_work_tree_are_refused(project):
    release(project, CLASH)
    rebase(project, "--to", NEW, code=4)
    resolve(project, ANSWER)
    git(work_tree(project), "-c", "core.editor=true", "cherry-pick", "--continue")
    commit(work_tree(project), {OVERLAY_PATH: b"# changed\n"}, "[Misc] Overlay\n\nTopic: overlay\n")
    done = rebase(project, "--continue", code=3)
    assert OVERLAY_PATH in done.err and not project.folder(NEW).exists()


def test_two_runs_at_once_wait_for_each_other(project):
    release(project, NEAR)
    rebase(project, "--to", NEW, env=killer(project, "cherry-pick"), code=-9)
    command = [sys.executable, str(project.root / "apply.py"), "rebase", "--continue"]
    runs = [subprocess.Popen(command, cwd=project.room, env=project.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    said = [r.communicate(timeout=120)[0].decode() for r in runs]
    assert sorted(r.returncode for r in runs) == [0, 2], said  # the second finds it done
    assert project.patches(NEW).keys() == project.patches().keys()


@pytest.mark.parametrize(("target", "command"), [("drift", "apply.py drift --ref 'v0.32.0'"), ("rebase", "apply.py rebase --to 'v0.32.0'")])
def test_make_targets_need_new(target, command):
    env = {k: v for k, v in os.environ.items() if k not in ("NEW", "HTML", "MAKEFLAGS")}
    done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and f"give NEW=the release, for example: make {target} NEW=v0.32.0" in done.stderr
    done = subprocess.run(["make", "-n", target, "NEW=v0.32.0"], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and command in done.stdout
