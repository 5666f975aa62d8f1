# SPDX-License-Identifier: Apache-2.0
"""`lint`: one bad fixture for each rule that it states, found as `path:line: why`."""
import hashlib
import json
import re
import shutil

import pytest

from . import project as fake
from .project import OLD, OVERLAY_PATH, TAG

PATCH = f"patches/{TAG}/beta.patch"
GAMMA = f"patches/{TAG}/gamma.patch"
SERIES = f"patches/{TAG}/series"
LOCK = f"patches/{TAG}/lock.json"
TOML = f"patches/{TAG}/base.toml"
OVERLAY = f"vllm_overlay/{OVERLAY_PATH}"


def replaced(old: str, new: str, count: int = 1):
    def edit(text: str) -> str:
        assert old in text, (old, text)
        return text.replace(old, new, count)

    return edit


def without(pattern: str):
    def edit(text: str) -> str:
        assert re.search(pattern, text, re.MULTILINE), (pattern, text)
        return re.sub(pattern, "", text, count=1, flags=re.MULTILINE)

    return edit


# rule -> (file, edit of its text, file that is named, what is said)
RULES = {
    "patch not listed": (SERIES, without("^gamma.patch\n"), GAMMA, "not listed"),
    "listed but missing": (SERIES, lambda t: t + "delta.patch\n", SERIES, "delta.patch"),
    "listed twice": (SERIES, lambda t: t + "alpha.patch\n", SERIES, "twice"),
    "unreadable line": (SERIES, lambda t: t + "what is this\n", SERIES, "cannot read"),
    "series without a last line end": (SERIES, lambda t: t.rstrip("\n"), SERIES, "line end"),
    "stray file": (f"patches/{TAG}/notes.txt", None, f"patches/{TAG}/notes.txt", "is no patch"),
    "stray patch": (f"patches/{TAG}/beta.patch.orig", None, f"patches/{TAG}/beta.patch.orig", "is no patch"),
    "first line": (PATCH, without("^From 0{40} .*\n"), PATCH, "expected"),
    "real commit id": (PATCH, replaced("From " + "0" * 40, "From " + "1" * 40), PATCH, "expected"),
    "numbered subject": (PATCH, replaced("Subject: ", "Subject: [PATCH 1/2] "), PATCH, ""),
    "diffstat": (PATCH, replaced("\n\ndiff --git", "\n---\n vllm/envs.py | 1 +\n\ndiff --git"), PATCH, "---"),
    "signature": (PATCH, lambda t: t + "-- \n2.39.5\n", PATCH, ""),
    "abbreviated index": (PATCH, lambda t: re.sub(r"(?m)^index ([0-9a-f]{9})[0-9a-f]+\.\.([0-9a-f]{9})[0-9a-f]+", r"index \1..\2", t, count=1), PATCH, "abbreviated"),
    "no last line end": (GAMMA, lambda t: t.rstrip("\n"), GAMMA, "line end"),
    "cut off": (PATCH, lambda t: t[: t.index('+    "VLLM_BETA"')], PATCH, "cut off"),
    "wrong hunk counts": (PATCH, lambda t: re.sub(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", lambda m: f"@@ -{m[1]},{m[2]} +{m[3]},{int(m[4]) + 9} @@", t, count=1), PATCH, "cut off"),
    "other topic": (PATCH, replaced("Topic: beta", "Topic: better"), PATCH, "Topic"),
    "unknown status": (PATCH, replaced("Upstream-Status: Pending", "Upstream-Status: Perhaps"), PATCH, "Upstream-Status"),
    "status without its reason": (PATCH, replaced("Upstream-Status: Pending", "Upstream-Status: Inappropriate"), PATCH, "Upstream-Status"),
    "sign-off without a mail": (PATCH, replaced("Signed-off-by: Ann <ann@x.invalid>", "Signed-off-by: Ann"), PATCH, "Signed-off-by"),
    "requires what comes later": (PATCH, replaced("Requires: none", "Requires: gamma"), SERIES, "gamma"),
    "requires the unknown": (PATCH, replaced("Requires: none", "Requires: nothing-such"), SERIES, "nothing-such"),
    "missing test": (PATCH, replaced("Tests: tests/stack", "Tests: tests/stack, tests/none.py::test_x"), PATCH, "tests/none.py"),
    "conflict marker": (PATCH, replaced('+    "VLLM_BETA"', '+<<<<<<< ours "VLLM_BETA"'), PATCH, "conflict marker"),
    "trailing white space": (PATCH, replaced('"0"))),\n', '"0"))), \n'), PATCH, "white space"),
    "no licence in a new file": (GAMMA, replaced("+# SPDX-License-Identifier: Apache-2.0\n", "+# free\n"), GAMMA, "SPDX"),
    "path outside": (PATCH, lambda t: t.replace("vllm/envs.py", "../envs.py"), PATCH, "../envs.py"),
    "symbolic link": (GAMMA, replaced("new file mode 100644", "new file mode 120000"), GAMMA, "symbolic"),
    "rename": (PATCH, lambda t: t + "diff --git a/README.md b/N.md\nsimilarity index 100%\nrename from README.md\nrename to N.md\n", PATCH, "rename"),
    "binary": (PATCH, lambda t: t + "diff --git a/x b/x\nnew file mode 100644\nindex 0000000000000000000000000000000000000000..257cc5642cb1a054f08cc83f2d943e56fd3ebe99\nGIT binary patch\nliteral 1\nIcmZPo\n\n", PATCH, "binary"),
    "overlay file missing": (TOML, replaced(f'"{OVERLAY_PATH}"', f'"{OVERLAY_PATH}", "vllm/none.py"'), TOML, "vllm/none.py"),
    "overlay listed twice": (TOML, replaced(f'"{OVERLAY_PATH}"', f'"{OVERLAY_PATH}", "{OVERLAY_PATH}"'), TOML, "twice"),
    "overlay outside": (TOML, replaced(f'"{OVERLAY_PATH}"', f'"{OVERLAY_PATH}", "../apply.py"'), None, "../apply.py"),
    "overlay without a licence": (OVERLAY, replaced("# SPDX-License-Identifier: Apache-2.0\n", ""), OVERLAY, "SPDX"),
    "overlay of no base": ("vllm_overlay/vllm/stray.py", None, "vllm_overlay/vllm/stray.py", "no base.toml"),
    "stale lock: patch": (PATCH, replaced("Why beta", "Because beta"), LOCK, "beta.patch has changed"),
    "stale lock: overlay": (OVERLAY, lambda t: t + "# more\n", LOCK, OVERLAY_PATH),
    "damaged lock": (LOCK, lambda t: t[:100], LOCK, "damaged"),
}  # fmt: skip
for key in ("Topic", "Upstream-Status", "Origin", "Retire-When", "Requires", "Tests", "Signed-off-by"):
    RULES[f"no {key}"] = (PATCH, without(f"^{key}: .*\n"), PATCH, f"`{key}:` is missing")
    RULES[f"empty {key}"] = (PATCH, lambda t, key=key: re.sub(f"(?m)^{key}: .*$", f"{key}:", t), PATCH, key)
    if key != "Signed-off-by":
        RULES[f"{key} twice"] = (PATCH, lambda t, key=key: re.sub(f"(?m)^({key}: .*)$", r"\1\n\1", t), PATCH, "2 times")


def test_the_template_is_clean(project):
    done = project.run("lint")
    assert done.out.startswith("clean") and done.err == ""  # both bases are in the cache: all was checked


@pytest.mark.parametrize("rule", RULES)
def test_each_rule(project, rule):
    file, edit, named, said = RULES[rule]
    path = project.root / file
    text = path.read_bytes().decode() if edit else ""
    path.write_bytes((edit(text) if edit else "x = 1\n").encode())
    done = project.run("lint", code=None)
    assert done.code == 1 or (named is None and done.code in (2, 3)), done
    lines = done.out.splitlines()
    if named:
        hits = [line for line in lines if re.match(rf"{re.escape(named)}:\d+: ", line) and said in line]
        assert hits, done
        at = int(hits[0].split(":")[1])
        target = project.root / named
        assert 1 <= at <= len(target.read_bytes().split(b"\n"))
    assert said in done.out + done.err and "Traceback" not in done.err
    shown = project.run("lint", "--json", code=None).json
    assert shown.get("error") or [f for f in shown["findings"] if said in f["why"]]


def relocked(project) -> None:
    """Make the lock agree with the patches, so that only the canonical form is left to find."""
    path = project.folder() / "lock.json"
    lock = json.loads(path.read_text())
    for entry in lock["patches"]:
        entry["sha256"] = hashlib.sha256((project.folder() / f"{entry['topic']}.patch").read_bytes()).hexdigest()
    path.write_text(json.dumps(lock, indent=1))


@pytest.mark.parametrize("edit", [
    lambda t: t.replace("diff --git a/vllm/crlf.py", "\ndiff --git a/vllm/crlf.py", 1),
    lambda t: t.replace("Why beta is needed.", "Why beta is needed.  ", 1),
    lambda t: t.replace("\n\nWhy beta", "\n\n\nWhy beta", 1),
    lambda t: re.sub(r"(?s)(diff --git a/vllm/crlf.py.*?)(diff --git a/vllm/envs.py.*?)(?=diff --git)", r"\2\1", t),
], ids=["blank line between files", "trailing white space in the message", "two blank lines", "order of files"])  # fmt: skip
def test_a_form_that_git_would_not_write(project, edit):
    path = project.root / PATCH
    text = path.read_bytes().decode()
    path.write_bytes(edit(text).encode())
    assert path.read_bytes() != text.encode()
    relocked(project)
    done = project.run("lint", code=1)
    assert re.search(rf"{re.escape(PATCH)}:\d+: ", done.out), done


def test_what_moved_is_still_canonical(project):
    """Other line numbers, blob ids and function names in hunk headers: an export keeps such a file, so lint takes it."""
    path = project.root / PATCH
    text = path.read_bytes().decode()
    edited = re.sub(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@.*", lambda m: f"@@ -{int(m[1])},{m[2]} +{int(m[3])},{m[4]} @@ def other():", text)
    path.write_bytes(re.sub(r"index [0-9a-f]{6}", "index 123456", edited).encode())
    assert path.read_bytes() != text.encode()
    relocked(project)
    project.run("lint")


def test_without_the_cache_it_says_what_it_did_not_check(project):
    shutil.rmtree(project.cache / "bases")
    done = project.run("lint")
    assert f"{TAG} is not in the cache" in done.err and not list(project.cache.glob("bases/*"))
    assert len(project.run("lint", "--json").json["notes"]) == 2


def test_every_base_is_looked_at(project):
    path = project.folder(OLD) / "alpha.patch"
    path.write_bytes(path.read_bytes().replace(b"Topic: alpha", b"Topic: alpine"))
    (project.root / PATCH).write_bytes((project.root / PATCH).read_bytes().replace(b"Topic: beta", b"Topic: bee"))
    done = project.run("lint", code=1)
    assert f"patches/{OLD}/alpha.patch:" in done.out and f"{PATCH}:" in done.out


def test_lint_changes_nothing(project):
    before = fake.snapshot(project.root)
    project.run("lint")
    assert fake.snapshot(project.root) == before
