# SPDX-License-Identifier: Apache-2.0
"""No git configuration, attribute, hook or environment variable of the user changes a result."""
import pathlib
import shutil

import pytest

from . import project as fake
from .project import OVERLAY_PATH, TAG, commit, expected, git, message, patched_files, snapshot, upstream_files

# Each changes, or breaks, what git does by itself; measured with git 2.39.
HOSTILE = {
    "apply.whitespace": "fix", "apply.ignoreWhitespace": "change", "am.keepcr": "false", "am.threeWay": "true", "am.messageid": "true",
    "commit.gpgsign": "true", "commit.template": "/nonexistent", "commit.cleanup": "scissors", "commit.status": "false", "gpg.program": "/bin/false", "tag.gpgSign": "true",
    "core.autocrlf": "true", "core.eol": "crlf", "core.safecrlf": "true", "core.whitespace": "cr-at-eol", "core.abbrev": "7", "core.quotePath": "true", "core.fileMode": "false",
    "core.pager": "false", "core.editor": "false", "core.commentChar": "T", "core.compression": "0", "core.bigFileThreshold": "1", "core.ignoreCase": "true",
    "core.untrackedCache": "true", "core.precomposeUnicode": "true", "core.logAllRefUpdates": "false", "core.sharedRepository": "0600", "core.checkStat": "minimal",
    "color.ui": "always", "color.diff": "always", "color.status": "always", "column.ui": "always",
    "diff.noprefix": "true", "diff.mnemonicPrefix": "true", "diff.context": "0", "diff.interHunkContext": "9", "diff.algorithm": "patience", "diff.suppressBlankEmpty": "true",
    "diff.renames": "copies", "diff.external": "/bin/false", "diff.relative": "true", "diff.indentHeuristic": "false", "diff.orderFile": "/nonexistent", "diff.wordRegex": ".", "diff.ignoreSubmodules": "all",
    "format.signOff": "true", "format.headers": "X-Evil: 1", "format.to": "evil@y.invalid", "format.cc": "evil@y.invalid", "format.coverLetter": "true", "format.attach": "true",
    "format.subjectPrefix": "EVIL", "format.numbered": "true", "format.thread": "deep", "format.useAutoBase": "true", "format.signature": "evil", "format.suffix": ".evil", "format.encodeEmailHeaders": "false",
    "format.pretty": "oneline", "format.from": "Evil <evil@y.invalid>", "format.notes": "true", "format.outputDirectory": "/nonexistent", "format.noprefix": "true",
    "i18n.commitEncoding": "iso-8859-1", "i18n.logOutputEncoding": "utf-16", "log.date": "relative", "log.showSignature": "true", "log.decorate": "full", "log.follow": "true", "log.mailmap": "true",
    "mailinfo.scissors": "true", "merge.conflictStyle": "zdiff3", "merge.renames": "false", "merge.ff": "only", "pull.rebase": "true", "rerere.enabled": "true", "rerere.autoUpdate": "true",
    "status.short": "true", "status.branch": "true", "status.showUntrackedFiles": "no", "status.relativePaths": "false", "status.submoduleSummary": "true", "status.showStash": "true",
    "trailer.separators": "#", "trailer.ifexists": "doNothing", "notes.displayRef": "*", "user.name": "Evil", "user.email": "evil@y.invalid", "user.useConfigOnly": "true", "author.name": "Evil", "committer.name": "Evil",
    "alias.apply": "!false", "alias.update-ref": "!false", "init.defaultBranch": "evil", "index.version": "4", "index.threads": "1", "feature.manyFiles": "true", "gc.auto": "1", "maintenance.auto": "true",
    "checkout.workers": "8", "protocol.version": "0", "fetch.prune": "true", "fetch.writeCommitGraph": "true", "fetch.fsckObjects": "true", "transfer.fsckObjects": "true", "submodule.recurse": "true",
    "help.autocorrect": "1", "advice.detachedHead": "true", "clean.requireForce": "false", "interactive.singleKey": "true", "core.splitIndex": "true", "pack.indexVersion": "1", "repack.writeBitmaps": "true",
    "fastimport.unpackLimit": "1000000", "core.hooksPath": "{room}/hooks", "core.attributesFile": "{room}/attributes", "core.excludesFile": "{room}/excludes", "init.templateDir": "{room}/template",
    "filter.evil.smudge": "sed s/a/b/", "filter.evil.clean": "sed s/a/c/", "filter.evil.required": "true", "diff.evil.textconv": "rev", "diff.evil.xfuncname": ".", "diff.evil.binary": "true",
}  # fmt: skip
ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "Evil", "GIT_AUTHOR_EMAIL": "evil@y.invalid", "GIT_AUTHOR_DATE": "1 +0000", "GIT_COMMITTER_NAME": "Evil", "GIT_COMMITTER_EMAIL": "evil@y.invalid", "GIT_COMMITTER_DATE": "1 +0000",
    "GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "apply.whitespace", "GIT_CONFIG_VALUE_0": "fix", "GIT_CONFIG_KEY_1": "core.autocrlf", "GIT_CONFIG_VALUE_1": "true",
    "GIT_CONFIG_PARAMETERS": "'diff.noprefix=true'", "GIT_DIFF_OPTS": "-u0", "GIT_EXTERNAL_DIFF": "/bin/false", "GIT_ATTR_SOURCE": "HEAD", "GIT_LITERAL_PATHSPECS": "0", "GIT_ICASE_PATHSPECS": "1",
    "GIT_DIR": "/nonexistent", "GIT_WORK_TREE": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent/index", "GIT_OBJECT_DIRECTORY": "{room}/objects", "GIT_ALTERNATE_OBJECT_DIRECTORIES": "/nonexistent", "GIT_COMMON_DIR": "/nonexistent",
    "GIT_NAMESPACE": "evil", "GIT_CEILING_DIRECTORIES": "/", "GIT_PREFIX": "evil/", "GIT_TEMPLATE_DIR": "{room}/template", "GIT_PAGER": "false", "GIT_EDITOR": "false", "GIT_SEQUENCE_EDITOR": "false",
    "GIT_QUARANTINE_PATH": "evil", "GIT_INTERNAL_SUPER_PREFIX": "evil/", "GIT_DEFAULT_HASH": "sha256", "GIT_NOTES_REF": "refs/notes/evil", "GIT_SHALLOW_FILE": "/nonexistent", "GIT_GRAFT_FILE": "/nonexistent", "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_REFLOG_ACTION": "evil", "GIT_MERGE_VERBOSITY": "5", "GIT_ADVICE": "1", "GIT_OPTIONAL_LOCKS": "1", "GIT_FLUSH": "1", "LESS": "-X", "PAGER": "false", "EDITOR": "false", "EMAIL": "evil@y.invalid",
    "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kolkata", "CDPATH": "/", "NO_COLOR": "1",
}  # fmt: skip
HOOKS = ("pre-commit", "commit-msg", "prepare-commit-msg", "applypatch-msg", "pre-applypatch", "post-checkout", "post-commit", "post-index-change", "reference-transaction", "post-applypatch", "post-rewrite", "pre-auto-gc")


def lay_traps(project) -> None:
    """Hooks that fail, attributes that convert, a template with both."""
    room = project.room
    for folder in (room / "hooks", room / "template" / "hooks"):
        folder.mkdir(parents=True)
        for name in HOOKS:
            (folder / name).write_text(f"#!/bin/sh\necho {name} >> {room}/hook-ran\nexit 1\n")
            (folder / name).chmod(0o755)
    attributes = "* text=auto eol=crlf filter=evil diff=evil ident whitespace=trailing-space working-tree-encoding=UTF-16\n*.patch binary\n"
    (room / "attributes").write_text(attributes)
    (room / "template" / "info").mkdir()
    (room / "template" / "info" / "attributes").write_text(attributes)
    (room / "excludes").write_text("*\n")
    (room / "objects").mkdir()


def set_all(project, file: pathlib.Path, keys=HOSTILE) -> None:
    """Write every hostile key into a configuration file."""
    lines = []
    for key, value in keys.items():
        section, _, rest = key.partition(".")
        name, _, variable = rest.rpartition(".")
        lines.append(f'[{section}{f" {chr(34)}{name}{chr(34)}" if name else ""}]\n\t{variable} = "{value.format(room=project.room)}"\n')
    with file.open("a") as f:
        f.write("".join(lines))


def reference(project) -> dict:
    """What the commands give without any configuration."""
    project.apply(dest=project.room / "ref")
    found = {"head": git(project.room / "ref", "rev-parse", "HEAD"), "patches": project.patches(), "files": snapshot(project.room / "ref")}
    shutil.rmtree(project.room / "ref")
    return found


def global_file(project) -> dict[str, str]:
    set_all(project, project.home / ".gitconfig")
    return {}


def xdg_file(project) -> dict[str, str]:
    (project.room / "xdg" / "git").mkdir(parents=True)
    set_all(project, project.room / "xdg" / "git" / "config")
    (project.room / "xdg" / "git" / "attributes").write_text((project.room / "attributes").read_text())
    return {"XDG_CONFIG_HOME": str(project.room / "xdg")}


def system_file(project) -> dict[str, str]:
    set_all(project, project.room / "system")
    return {"GIT_CONFIG_SYSTEM": str(project.room / "system"), "GIT_CONFIG_GLOBAL": str(project.room / "system")}


def variables(project) -> dict[str, str]:
    return {k: v.format(room=project.room) for k, v in ENVIRONMENT.items()}


SURROUNDINGS = [global_file, xdg_file, system_file, variables]


def test_enough_keys():
    assert len(HOSTILE) >= 100 and len(ENVIRONMENT) >= 40


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("source", ["auto", "pypi", "git"])
def test_a_fresh_apply(project, surrounding, source):
    want = reference(project)
    lay_traps(project)
    environment = surrounding(project)
    if source != "auto":
        shutil.rmtree(project.cache)
    project.apply("--source", source, env=environment)
    if source != "git":
        assert git(project.tree, "rev-parse", "HEAD") == want["head"]
        assert snapshot(project.tree) == want["files"]
    assert {k: v for k, v in snapshot(project.tree).items() if k != "vllm/_version.py"} == expected(patched_files(), link=source == "git")
    assert project.run("status", project.tree, "--json", env=environment).json["state"] == "applied"
    project.run("verify", project.tree, env=environment)
    project.run("lint", env=environment)
    assert not (project.room / "hook-ran").exists()
    assert list((project.room / "objects").iterdir()) == []
    assert git(project.tree, "status", "--porcelain") == ""
    project.run("unapply", project.tree, env=environment)
    assert {k: v for k, v in snapshot(project.tree).items() if k != "vllm/_version.py"} == expected(upstream_files(), link=source == "git")
    assert not (project.room / "hook-ran").exists()


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_export(project, surrounding):
    def edit(tree: pathlib.Path) -> None:
        text = (tree / "vllm/envs.py").read_bytes()
        commit(tree, {"vllm/envs.py": text.replace(b"import os\n", b"import os  \n\n"), "docs/\u00fc \u00ef.md": b"tab\t \r\n\r\n \n"}, message("delta", "[Bugfix][Doc] D\u00e9lta, a long subject: " + "word " * 30 + "end"), "Zo\u00eb <z@x.invalid>")
        commit(tree, {OVERLAY_PATH: (tree / OVERLAY_PATH).read_bytes() + b"# caf\xc3\xa9\n"}, message("overlay", "o"))

    project.apply()
    edit(project.tree)
    shutil.copytree(project.root, project.room / "second")
    shutil.copytree(project.tree, project.room / "tree2", symlinks=True)
    project.run("export", project.tree)
    want = project.patches(), snapshot(project.root / "vllm_overlay")
    lay_traps(project)
    environment = surrounding(project)
    project.root = project.room / "second"
    project.run("export", project.room / "tree2", env=environment)
    assert (project.patches(), snapshot(project.root / "vllm_overlay")) == want
    assert "nothing to export" in project.run("export", project.room / "tree2", env=environment).out
    assert not (project.room / "hook-ran").exists()


LOCAL = {k: v for k, v in HOSTILE.items() if not k.startswith(("init.", "fastimport"))}


@pytest.mark.parametrize("keys", [LOCAL, {"core.bare": "true"}, {"core.worktree": "/nonexistent"}, {"log.showSignature": "true"}, {"core.sparseCheckout": "true", "core.sparseCheckoutCone": "false"}], ids=["all", "bare", "worktree", "signature", "sparse"])
def test_the_tree_s_own_configuration(project, keys):
    want = reference(project)
    clone = project.clone()
    lay_traps(project)
    set_all(project, clone / ".git/config", keys)
    untouched = (clone / ".git/config").read_bytes()
    project.apply(dest=clone)
    assert snapshot(clone) == expected(patched_files(), link=True)
    project.apply(dest=clone)
    assert project.run("status", clone, "--json").json["state"] == "applied"
    project.run("verify", clone)
    assert "nothing to export" in project.run("export", clone).out
    assert project.patches() == want["patches"]
    project.run("unapply", clone)
    assert snapshot(clone) == expected(upstream_files(), link=True)
    assert (clone / ".git/config").read_bytes() == untouched
    assert not (project.room / "hook-ran").exists()


@pytest.mark.parametrize("number", range(12))
def test_export_under_some_keys_of_the_tree(shared, number):
    """A few keys at a time, so that one does not hide another; the keys of one section come apart."""
    project, tree, config, want = shared
    (tree / ".git/config").write_bytes(config)
    set_all(project, tree / ".git/config", {key: LOCAL[key] for key in sorted(LOCAL)[number::12]})
    assert "nothing to export" in project.run("export", tree, "--dry-run").out
    assert project.patches() == want


@pytest.fixture(scope="module")
def shared(template, tmp_path_factory):
    project = fake.copy_of(template, tmp_path_factory.mktemp("config") / "room")
    lay_traps(project)
    project.apply()
    return project, project.tree, (project.tree / ".git/config").read_bytes(), project.patches()


def test_the_pin_does_not_depend_on_the_configuration(project):
    """A repository URL rewritten by the user (url.insteadOf) is followed: fetching runs as the user would."""
    (project.home / ".gitconfig").write_text(f'[url "file://{project.upstream}"]\n\tinsteadOf = https://mirror.invalid/vllm\n')
    project.apply("--source", "https://mirror.invalid/vllm")
    assert git(project.tree, "rev-parse", "refs/patchstack/base") == project.commit_of(TAG)
