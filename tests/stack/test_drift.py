# SPDX-License-Identifier: Apache-2.0
"""`drift` on synthetic releases: the state of each patch, the signals, names and calls that do not fit, the report, the page."""
import html.parser
import json
import os
import re

import pytest

from .project import EDITS, FILES, LINK, OVERLAY_PATH, SPDX, TAG, git, snapshot
from .releases import CLASH, MOVED, NEAR, NEW, NEWER, STATE, TAKEN, add_patch, digest, directory, drift, merged, release, replaced, states

CLEAN = {"alpha": "clean", "beta": "clean", "gamma": "clean"}
ENVS, OLD_PY = "vllm/envs.py", "vllm/old.py"
# `alpha` taken by upstream, with a comment of its own above: no longer the same lines around it.
REWORKED = {STATE: TAKEN[STATE].replace(b'    """How many ranks the group has."""\n', b'    """The number of ranks."""\n')}


@pytest.mark.parametrize(("edits", "expected"), [
    ({"docs/notes.md": b"unrelated\n"}, CLEAN),
    (MOVED, CLEAN | {"alpha": "offset"}),
    (NEAR, CLEAN | {"alpha": "3-way"}),
    (TAKEN, CLEAN | {"alpha": "already-upstream"}),
    (CLASH, CLEAN | {"alpha": "conflict"}),
    (REWORKED, CLEAN | {"alpha": "conflict"}),
    ({OLD_PY: None, "docs/a file.md": None}, CLEAN | {"gamma": "missing file"}),
    (EDITS["gamma"][2], CLEAN | {"gamma": "already-upstream"}),  # also where upstream took a removal
    (merged(CLASH, {ENVS: None}), CLEAN | {"alpha": "conflict", "beta": "missing file"}),  # one trouble does not hide the next
])  # fmt: skip
def test_states(project, edits, expected):
    told = drift(project, directory(project, edits))
    assert states(told) == expected
    assert told[""]["needs_work"] == bool(set(expected.values()) & {"conflict", "missing file"} or told[""]["findings"])


def test_exit_code_is_one_only_if_a_human_is_needed(project):
    fine, bad = directory(project, merged(MOVED, TAKEN), "fine"), directory(project, CLASH, "bad")
    assert project.run("drift", "--ref", fine).out.splitlines()[2].split() == ["alpha", "already-upstream"]
    assert "alpha: conflict" in project.run("drift", "--ref", fine, "--ref", bad, code=1).out


def test_an_offset_names_the_file(project):
    told = drift(project, directory(project, MOVED))
    assert len(told["alpha"]["offsets"]) == 1 and told["alpha"]["offsets"][0].startswith(f"{STATE}: hunk 1 ") and "offset 3 lines" in told["alpha"]["offsets"][0]


def test_a_conflict_shows_ours_base_and_theirs_and_where(project):
    told = drift(project, directory(project, merged(CLASH, {"vllm/no_newline.py": b"X = 1\nY = 7"})))
    region, = told["alpha"]["regions"]
    assert region["path"] == STATE and region["moved_by"] is None
    assert "def group_size():" in region["ours"] and "def other():" in region["theirs"] and "def group_size():" not in region["theirs"]
    theirs = CLASH[STATE].decode().splitlines()
    assert theirs[region["line"] - 1 : region["line"] - 1 + len(region["theirs"])] == region["theirs"]
    other, = told["beta"]["regions"]
    assert (other["path"], other["ours"], other["base"], other["theirs"]) == ("vllm/no_newline.py", ["Y = 3"], ["Y = 2"], ["Y = 7"])


def test_lines_like_conflict_markers_do_not_confuse_the_regions(project):
    path = "docs/a file.md"
    told = drift(project, directory(project, {path: b"=======\n<<<<<<< ours\n||||||| base\n"}))
    region, = told["gamma"]["regions"]
    assert region["theirs"] == ["=======", "<<<<<<< ours", "||||||| base"] and region["base"] == ["a path with a space"]


def test_every_region_of_a_file_is_reported(project):
    before = FILES[STATE].decode()
    add_patch(project, "twice", {STATE: TAKEN[STATE].replace(b"return [tensor] * self.world_size", b"return [tensor for _ in range(self.world_size)]").replace(b'"""Make a group."""', b'"""Make one group."""')})
    new = before.replace("return [tensor] * self.world_size", "return self.world_size * [tensor]").replace('"""Make a group."""', '"""Make the group."""')
    told = drift(project, directory(project, {STATE: new.encode()}))
    lines = [(r["line"], r["theirs"]) for r in told["twice"]["regions"]]
    carried = new.replace("def get_group():\n", 'def group_size():\n    """How many ranks the group has."""\n    return len(_GROUP[0])\n\n\ndef get_group():\n').splitlines()  # alpha is below
    assert [carried[n - 1] for n, _ in lines] == [t[0] for _, t in lines] and len(lines) == 2


def test_crlf_files_are_carried_and_conflicts_in_them_are_readable(project):
    dos = FILES["vllm/crlf.py"]
    assert states(drift(project, directory(project, {"vllm/crlf.py": b"# first\r\n" + dos}, "moved")))["beta"] in ("offset", "3-way")
    region, = drift(project, directory(project, {"vllm/crlf.py": dos.replace(b"B = 2", b"B = 5")}, "clash"))["beta"]["regions"]
    assert (region["base"], region["theirs"]) == (["B = 2"], ["B = 5"])
    turned = drift(project, directory(project, {"vllm/crlf.py": dos.replace(b"\r\n", b"\n")}, "unix"))
    assert turned["beta"]["state"] == "conflict"


def test_upstream_turns_a_file_into_a_symlink(project):
    release(project)
    up = project.upstream
    git(up, "tag", "-d", NEW)
    (up / "docs/a file.md").unlink()
    (up / "docs/a file.md").symlink_to("../README.md")
    git(up, "add", "-A")
    git(up, "commit", "-qm", "links")
    git(up, "tag", NEW)
    told = drift(project, NEW, env={"VLLM_REPO": str(up)})
    assert told["gamma"]["state"] == "conflict" and told["gamma"]["note"].startswith("git cannot carry it: docs/a file.md") and told["gamma"]["signals"] == []
    assert {k: told[k]["state"] for k in ("alpha", "beta")} == {"alpha": "clean", "beta": "clean"}


def test_a_change_that_git_cannot_try_is_a_conflict_never_upstream(project):
    """3-way that fails before it writes anything leaves the tree as it was: that is not `nothing left of the change`."""
    folder = directory(project, {"vllm/gamma.py/inner.txt": b"a folder where a file of ours goes\n"})
    told = drift(project, folder)
    assert told["gamma"]["state"] == "conflict" and "vllm/gamma.py" in told["gamma"]["note"]
    both = drift(project, directory(project, {"vllm/gamma.py/inner.txt": b"x\n", "docs/a file.md": b"other words\n"}, "both"))
    assert both["gamma"]["state"] == "conflict" and both["gamma"]["note"] and both["beta"]["state"] == "clean"


def test_both_added_the_same_file(project):
    told = drift(project, directory(project, {"vllm/gamma.py": b"# theirs\n"}))
    region, = told["gamma"]["regions"]
    assert told["gamma"]["state"] == "conflict" and region["path"] == "vllm/gamma.py" and region["base"] == [] and region["theirs"] == ["# theirs"]


# ---- where files went


def test_a_renamed_file_is_named(project):
    told = drift(project, directory(project, {STATE: None, "vllm/distributed/group_state.py": MOVED[STATE]}))
    assert told["alpha"]["state"] == "missing file" and told["alpha"]["missing"] == [STATE]
    assert "renamed to vllm/distributed/group_state.py" in told["alpha"]["note"]


def test_a_file_that_became_a_package(project):
    head, tail = FILES[STATE].split(b"class Coordinator:")
    told = drift(project, directory(project, {STATE: None, "vllm/distributed/parallel_state/__init__.py": b"from .groups import *\nfrom .coordinator import Coordinator\n",
                                              "vllm/distributed/parallel_state/groups.py": head, "vllm/distributed/parallel_state/coordinator.py": b"class Coordinator:" + tail}))  # fmt: skip
    assert told["alpha"]["state"] == "missing file"
    assert "package" in told["alpha"]["note"] and "vllm/distributed/parallel_state/groups.py" in told["alpha"]["note"]


def test_a_split_file_names_the_files_that_have_its_functions(project):
    told = drift(project, directory(project, {STATE: None, "vllm/distributed/a.py": b"def init_group(): ...\n\n\ndef get_group(): ...\n", "vllm/distributed/b.py": b"class Coordinator: ...\n"}))
    assert "vllm/distributed/a.py (2)" in told["alpha"]["note"] and "vllm/distributed/b.py (1)" in told["alpha"]["note"]


def test_the_rest_of_a_patch_with_a_missing_file_is_still_tried(project):
    told = drift(project, directory(project, {ENVS: None, "vllm/no_newline.py": b"X = 1\nY = 7"}))
    assert told["beta"]["state"] == "missing file" and [r["path"] for r in told["beta"]["regions"]] == ["vllm/no_newline.py"]


def test_a_patch_that_needs_one_that_was_not_carried_says_so(project):
    add_patch(project, "delta", {"README.md": b"# vLLM, a small fake, edited\n"}, trailers={"Requires": "alpha"})
    told = drift(project, directory(project, CLASH))
    assert told["delta"]["state"] == "clean" and "requires alpha, which was not carried" in told["delta"]["note"]


# ---- the signals that upstream has a patch


def test_signal_reverse_applies(project):
    signal, = drift(project, directory(project, TAKEN))["alpha"]["signals"]
    assert signal.startswith("reverse:")


def test_signal_empty_after_three_way(project):
    """Upstream took the change and changed a line beside it: it does not reverse, and 3-way finds nothing left."""
    edits = {STATE: TAKEN[STATE].replace(b'    """The group; None before `init_group`."""\n', b'    """The group, or None."""\n')}
    told = drift(project, directory(project, edits))
    assert told["alpha"]["state"] == "already-upstream" and told["alpha"]["signals"][0].startswith("empty:")


def test_signal_retire_when_names_a_version(project):
    add_patch(project, "delta", {"README.md": b"# edited\n"}, trailers={"Retire-When": "base >= v1.3"})
    release(project, tag="v1.2.9")
    release(project, {"docs/more.md": b"x\n"}, tag=NEW)
    assert drift(project, "v1.2.9")["delta"]["signals"] == []
    told = drift(project, NEW)["delta"]
    assert told["state"] == "clean" and told["signals"] == ["declared: Retire-When says base >= v1.3"]


# patch-id and the merged pull request need history: test_carve.py


# ---- overlay


def test_overlay_collision(project):
    told = drift(project, directory(project, {OVERLAY_PATH: b"# upstream's own\n"}), code=1)
    assert told[""]["overlay_collisions"] == [OVERLAY_PATH] and told[""]["needs_work"]
    assert f"upstream has {OVERLAY_PATH} now" in project.run("drift", "--ref", project.room / "next", code=1).out


# ---- names and calls


def findings(told: dict) -> list[str]:
    return [f"{f['path']}:{f['line']}: {f['why']}" for f in told[""]["findings"]]


def test_no_findings_on_the_own_base(project):
    assert findings(drift(project, TAG, code=0)) == []


def test_a_removed_name_says_where_it_was_where_it_is_and_the_nearest(project):
    class_at = FILES[STATE].index(b"class Coordinator")
    end = FILES[STATE].index(b"def destroy")
    moved = {STATE: FILES[STATE][:class_at] + b"class Coordinators:\n    pass\n\n\n" + FILES[STATE][end:], "vllm/distributed/coordinator.py": FILES[STATE][class_at:end]}
    found, = findings(drift(project, directory(project, moved)))
    line = FILES[STATE][:class_at].count(b"\n") + 1
    assert found.startswith(f"{OVERLAY_PATH}:") and "imports Coordinator" in found and "nearest: Coordinators" in found
    assert f"it was in {STATE}:{line}" in found or f"it was in {STATE}:{line + 5}" in found  # of the patched base
    assert found.endswith("now in vllm/distributed/coordinator.py")


def test_a_removed_attribute_of_a_module_says_the_same(project):
    add_patch(project, "delta", {"vllm/delta.py": SPDX.encode() + b"import vllm.distributed.parallel_state as ps\n\n\ndef delta():\n    return ps.destroy()\n"})
    end = FILES[STATE].index(b"def destroy")
    found, = findings(drift(project, directory(project, {STATE: FILES[STATE][:end] + b"def destroy_all():\n    pass\n", "vllm/distributed/gone.py": FILES[STATE][end:]})))
    assert "no name 'destroy'" in found and "nearest: destroy_all" in found and f"it was in {STATE}:" in found and "now in vllm/distributed/gone.py" in found


def test_a_function_that_gained_a_required_argument(project):
    add_patch(project, "delta", {"vllm/delta.py": SPDX.encode() + b'from vllm.distributed.parallel_state import init_group\n\n\ndef delta():\n    return init_group([0], "gloo")\n'})
    new = {STATE: replaced(STATE, "def init_group(ranks, backend, *, name=None):", "def init_group(ranks, backend, timeout, *, name=None):")}
    told = drift(project, directory(project, new), code=1)
    found, = findings(told)
    assert told["delta"]["state"] == "clean" and found.startswith("vllm/delta.py:6: ") and "init_group" in found and "'timeout'" in found
    assert f"was ({STATE}:" in found and "init_group(ranks, backend, *, name=None)" in found


def test_a_removed_import_that_we_use_only_inside_a_function(project):
    add_patch(project, "delta", {ENVS: EDITS["beta"][2][ENVS] + b"\n\ndef home():\n    return os.path.expanduser('~')\n"})
    new = FILES[ENVS].replace(b"import os\n", b"from os import getenv\n").replace(b"os.getenv", b"getenv")
    told = drift(project, directory(project, {ENVS: new}), code=1)
    assert told["delta"]["state"] in ("clean", "offset", "3-way")
    assert any(f.startswith(ENVS) and "'os' is not defined" in f for f in findings(told))


def test_a_variable_that_is_not_registered_any_more(project):
    add_patch(project, "delta", {"vllm/delta.py": SPDX.encode() + b'import os\n\nHOST = os.environ["VLLM_HOST_IP"]\n'})
    new = {ENVS: FILES[ENVS].replace(b"VLLM_HOST_IP", b"VLLM_HOST_IPS")}
    assert any("reads VLLM_HOST_IP," in f and "VLLM_HOST_IPS" in f for f in findings(drift(project, directory(project, new))))


def test_what_comes_with_a_patch_that_was_not_carried_is_no_finding(project):
    """gamma imports group_size, which alpha brings: alpha's conflict is the only trouble."""
    told = drift(project, directory(project, CLASH))
    assert told["alpha"]["state"] == "conflict" and findings(told) == []


def test_a_re_export_of_a_patch_that_was_not_carried_is_no_finding(project):
    path = "vllm/distributed/__init__.py"
    add_patch(project, "delta", {path: b"from vllm.distributed.parallel_state import (\n    get_group,  # noqa: F401\n)\n"})
    add_patch(project, "eta", {"vllm/eta.py": SPDX.encode() + b"from vllm.distributed import get_group\n\nGROUP = get_group()\n"})
    told = drift(project, directory(project, {path: b"# theirs\n"}))
    assert told["delta"]["state"] == "conflict" and told["eta"]["state"] == "clean" and findings(told) == []


def test_a_trouble_that_the_own_base_has_too_is_no_finding(project):
    add_patch(project, "delta", {"vllm/delta.py": SPDX.encode() + b"from vllm.envs import NOT_THERE\n"})
    assert findings(drift(project, directory(project, MOVED))) == []


# ---- the command


def test_drift_changes_nothing_on_disk_but_the_cache(project):
    release(project, CLASH)
    folder = directory(project, CLASH)
    before = [digest(p) for p in (project.root, project.upstream, project.home, project.room / "work", folder)]
    project.run("drift", "--ref", NEW, "--ref", folder, code=1)
    project.run("rebase", "--to", NEW, "--dry-run", code=1)
    assert [digest(p) for p in (project.root, project.upstream, project.home, project.room / "work", folder)] == before
    assert os.listdir(project.temp) == [] and project.leftovers() == [f"cache/bases/.directory-{n}.git" for n in re.findall(r"directory-(\d+)", " ".join(project.leftovers()))]


def test_a_matrix_of_releases(project):
    release(project, MOVED)
    release(project, merged(CLASH), tag=NEWER)
    out = project.run("drift", "--ref", TAG, "--ref", NEW, "--ref", NEWER, code=1).out.splitlines()
    assert out[0].split() == ["on", TAG, TAG, NEW, NEWER]
    assert [line.split() for line in out[2:5]] == [["alpha", "clean", "offset", "conflict"], ["beta", *["clean"] * 3], ["gamma", *["clean"] * 3]]
    told = project.run("drift", "--json", "--ref", TAG, "--ref", NEWER, code=1).json
    assert [d["ref"] for d in told["drifts"]] == [TAG, NEWER]


def test_json_schema(project):
    told = project.run("drift", "--json", "--ref", directory(project, CLASH), code=1).json
    assert {k: type(v) for k, v in told.items()} == {"schema": int, "command": str, "base": str, "drifts": list}
    assert (told["schema"], told["command"], told["base"]) == (1, "drift", TAG)
    one, = told["drifts"]
    assert {k: type(v) for k, v in one.items()} == {"base": str, "ref": str, "patches": list, "overlay_collisions": list, "findings": list, "needs_work": bool}
    assert {k: type(v) for k, v in one["patches"][0].items()} == {"topic": str, "state": str, "offsets": list, "missing": list, "regions": list, "signals": list, "note": str}
    assert {k: type(v) for k, v in one["patches"][0]["regions"][0].items()} == {"path": str, "line": int, "ours": list, "base": list, "theirs": list, "moved_by": type(None)}


def test_latest_is_the_newest_release_of_the_index(project):
    release(project, MOVED)
    (project.cache / "downloads" / f"vllm-{NEW[1:]}.tar.gz").unlink()  # the real way, through pip
    told = drift(project, "latest")
    assert told[""]["ref"] == NEW and told["alpha"]["state"] == "offset"


def test_latest_without_an_index(project):
    done = project.run("drift", "--ref", "latest", code=5, env={"PIP_FIND_LINKS": str(project.home)})
    assert "name the release with --ref" in done.err and "[" not in done.err.splitlines()[0]


@pytest.mark.parametrize("kind", ["clone", "bare", "sdist", "directory"])
def test_a_release_may_be_a_path(project, kind):
    release(project, MOVED)
    if kind == "clone":
        path = project.clone("next-clone", at=NEW)
    elif kind == "bare":
        git(project.room, "clone", "--quiet", "--bare", "upstream", "bare.git")
        path = project.room / "bare.git"
    elif kind == "sdist":
        path = project.sdist(NEW)
    else:
        path = directory(project, MOVED)
    told = drift(project, path, code=0)
    assert states(told) == CLEAN | {"alpha": "offset"} and told[""]["ref"] == path.name


def test_a_clone_is_looked_at_as_it_is_now_not_as_it_was(project):
    release(project, MOVED)
    path = project.clone("next-clone", at=NEW)
    assert drift(project, path)["alpha"]["state"] == "offset"
    git(path, "checkout", "--quiet", TAG)
    assert drift(project, path)["alpha"]["state"] == "clean"


@pytest.mark.parametrize(("ref", "code", "said"), [("no/such/path", 2, "no such path"), ("what?", 2, "neither a release"), ("v9.9.9", 5, "v9.9.9")])
def test_a_release_that_is_not_there(project, ref, code, said):
    assert said in project.run("drift", "--ref", ref, code=code).err


# ---- the page


class Page(html.parser.HTMLParser):
    """Collects what a browser would load and run, the headings and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.outside, self.handlers, self.ids, self.links, self.text = [], [], [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data", "poster") and not (value or "").startswith(("#", "data:,")):
                self.outside.append((tag, name, value))
            if name.startswith("on"):
                self.handlers.append((tag, name))
            if name == "id":
                assert value not in self.ids
                self.ids.add(value)
            if name == "href" and value.startswith("#"):
                self.links.append(value[1:])

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = b'<script>alert(1)</script><img src="http://evil.invalid/x" onerror="alert(2)">'


def test_the_page_loads_nothing_runs_nothing_and_shows_hostile_lines_as_text(project):
    add_patch(project, "hostile", {"README.md": b"# mine " + HOSTILE + b"\n"}, subject="[Core] </pre><script>alert(3)</script>", trailers={"Retire-When": "base >= v0.1 <b onclick=x>"})
    folder = directory(project, {"README.md": b"# theirs </pre>" + HOSTILE + b"\n"}, 'next"><svg onload=alert(4)>')
    other = directory(project, MOVED, "other")
    target = project.room / "out" / "page.html"
    project.run("drift", "--ref", folder, "--ref", other, "--html", target, code=1)
    page = Page(target.read_text("utf-8"))
    assert page.outside == [] and page.handlers == []
    assert not {"script", "img", "svg", "iframe", "b"} & set(page.tags)
    assert "@import" not in target.read_text() and "url(" not in target.read_text()
    assert HOSTILE.decode() in "".join(page.text)
    assert page.links and set(page.links) <= page.ids  # every cell of the matrix leads somewhere
    assert snapshot(target.parent).keys() == {"page.html"}


def test_the_page_shows_every_state_and_all_three_sides(project):
    folder = directory(project, merged(CLASH, {ENVS: None, "docs/a file.md": b"a path with a space, edited\n", OVERLAY_PATH: b"# theirs\n"}))
    target = project.room / "page.html"
    project.run("drift", "--ref", folder, "--html", target, code=1)
    text = "".join(Page(target.read_text("utf-8")).text)
    for shown in ("conflict", "missing file", "def group_size():", "def other():", "ours", "base", "theirs", f"{STATE}:", OVERLAY_PATH):
        assert shown in text, shown


def test_a_stack_without_patches(project):
    (project.folder() / "series").write_text("")
    target = project.room / "page.html"
    done = project.run("drift", "--ref", directory(project, MOVED), "--html", target, code=None)
    assert done.code in (0, 1) and "has no patch" in done.out and target.exists(), str(done)


def test_a_link_that_git_knows_is_a_file_in_the_sdist(project):
    """An sdist has the content where git has a link: nobody's patch is at fault."""
    release(project, MOVED)
    told = drift(project, NEW)
    assert states(told) == CLEAN | {"alpha": "offset"} and (project.upstream / LINK).is_symlink()
    assert json.dumps(told).count(LINK) == 0
