# SPDX-License-Identifier: Apache-2.0
"""`verify`: what is found in a tree whose lines do not fit, and what is not taken for a finding."""
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from . import project as fake
from .project import OVERLAY_PATH, commit, git, message, snapshot, write_files

HEAD = fake.SPDX


def with_module(project, text: str, *, path: str = "vllm/delta.py") -> fake.Result:
    """Add a module by a commit, export it (so that the lock agrees), and verify."""
    commit(project.tree, {path: text.encode()}, message("delta", "[Core] Delta"))
    project.run("export", project.tree)
    return project.run("verify", project.tree, "--json", code=None)


# name -> (text of a new module, line of the finding, words of it)
BAD = {
    "syntax": ("def f(:\n    pass\n", 2, ["does not compile"]),
    "compile": ("def f():\n    return 1\n\nreturn 2\n", 5, ["does not compile"]),
    "name at module level": ("from vllm.distributed.parallel_state import get_groups\n\nget_groups\n", 2, ["get_groups", "get_group"]),
    "name inside a function": ("def f():\n    from vllm.envs import nothing\n    return nothing\n", 3, ["nothing", "vllm.envs"]),
    "name under TYPE_CHECKING": ("from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from vllm.envs import Missing\n", 5, ["Missing"]),
    "name in try": ("try:\n    from vllm.envs import missing_one\nexcept ValueError:\n    missing_one = None\n", 3, ["missing_one"]),
    "module": ("import vllm.nowhere\n", 2, ["vllm.nowhere"]),
    "module by from": ("from vllm.nowhere import x\n", 2, ["vllm.nowhere"]),
    "relative": ("from .distributed.parallel_state import nothing_here\n", 2, ["nothing_here"]),
    "attribute of a module": ("import vllm.distributed.parallel_state as ps\n\n\ndef f():\n    return ps.get_grup()\n", 6, ["get_grup", "get_group"]),
    "attribute of a package path": ("import vllm.distributed.parallel_state\n\nx = vllm.distributed.parallel_state.gone\n", 4, ["gone"]),
    "too many arguments": ("from vllm.distributed.parallel_state import get_group\n\nget_group(1)\n", 4, ["does not bind"]),
    "too few arguments": ("from vllm.distributed.parallel_state import init_group\n\n\ndef f():\n    return init_group([0])\n", 6, ["does not bind", "backend"]),
    "unknown keyword": ("from vllm.distributed.parallel_state import init_group\n\ninit_group([0], 'gloo', nam='x')\n", 4, ["does not bind", "nam"]),
    "keyword only by position": ("from vllm.distributed.parallel_state import init_group\n\ninit_group([0], 'gloo', 'x')\n", 4, ["does not bind"]),
    "given twice": ("from vllm.distributed.parallel_state import init_group\n\ninit_group([0], 'gloo', ranks=1)\n", 4, ["does not bind"]),
    "constructor": ("from vllm.distributed.parallel_state import Coordinator\n\nCoordinator(0, 1, 2)\n", 4, ["Coordinator", "does not bind"]),
    "constructor of a subclass": ("from vllm.distributed.parallel_state import Coordinator\n\n\nclass Mine(Coordinator):\n    pass\n\n\nMine()\n", 9, ["Mine", "rank"]),
    "method of self": ("from vllm.distributed.parallel_state import Coordinator\n\n\nclass Mine(Coordinator):\n    def f(self):\n        return self.gather()\n", 7, ["gather", "tensor"]),
    "super": ("from vllm.distributed.parallel_state import Coordinator\n\n\nclass Mine(Coordinator):\n    def gather(self, tensor, dim=0):\n        return super().gather(tensor, dim, 3)\n", 7, ["gather"]),
    "own function": ("def f(a, b):\n    return a\n\n\ndef g():\n    return f(1)\n", 7, ["does not bind"]),
    "by module": ("from vllm.distributed import parallel_state\n\n\ndef f():\n    parallel_state.destroy(1)\n", 6, ["destroy"]),
    "variable by getenv": ("import os\n\nX = os.getenv('VLLM_NOT_THERE')\n", 4, ["VLLM_NOT_THERE", "vllm/envs.py"]),
    "variable by get": ("import os\n\n\ndef f():\n    return os.environ.get('VLLM_BETTA', '0')\n", 6, ["VLLM_BETTA", "VLLM_BETA"]),
    "variable by index": ("import os\n\nX = os.environ['VLLM_NOT_THERE']\n", 4, ["VLLM_NOT_THERE"]),
    "variable by envs": ("import vllm.envs as envs\n\n\ndef f():\n    return envs.VLLM_NOT_THERE\n", 6, ["VLLM_NOT_THERE"]),
    "variable by from vllm": ("from vllm import envs\n\nX = envs.VLLM_NOT_THERE\n", 4, ["VLLM_NOT_THERE"]),
    "variable by import": ("from vllm.envs import VLLM_NOT_THERE\n", 2, ["VLLM_NOT_THERE"]),
    "unbound name": ("def f():\n    return undefined_name\n", 3, ["undefined_name"]),
}  # fmt: skip

GOOD = {
    "all of it right": "import os\nfrom functools import partial\n\nimport vllm.envs as envs\nfrom vllm.distributed import parallel_state\nfrom vllm.distributed.parallel_state import Coordinator, init_group\n\nX = os.getenv('VLLM_HOST_IP'), os.getenv('HOME'), envs.VLLM_BETA, parallel_state._GROUP\ninit_group(*[1, 2], **{})\ninit_group([0], backend='gloo', name=None)\nf = partial(init_group, [0])\nc = Coordinator(world_size=2, rank=0).gather(1, dim=2)\n",
    "symbols of python 3.10+": "def f(x):\n    match x:\n        case {'a': y, **rest}:\n            return y, rest\n        case [first, *others]:\n            return first, others\n    return [z for z in x if (w := z)], w\n",
    "names bound late": "def f():\n    return LATER\n\n\ndef g():\n    global LATER\n    LATER = 1\n\n\nclass C:\n    def m(self):\n        return __class__, self.anything(1, 2)\n",
    "other packages": "import torch\nfrom triton import language as tl\n\ntorch.nowhere(1)\ntl.load(1)\nclass D(torch.nn.Module):\n    def f(self):\n        return self.register_buffer('x')\n",
    "shadowed": "from vllm.distributed.parallel_state import get_group\n\n\ndef f(get_group):\n    return get_group(1, 2, 3)\n\n\ndef g():\n    get_group = print\n    get_group(1)\n",
    "decorated and async": "import contextlib\n\n\n@contextlib.contextmanager\ndef f(a):\n    yield a\n\n\nasync def g(a, /, b, *, c=1):\n    async with f(a) as x:\n        return x\n\n\nlambda q: (q, g(1, b=2, c=3))\n",
    "try and except": "try:\n    import flash_attn\nexcept ImportError as e:\n    flash_attn = None\n    print(e)\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_found(applied, name):
    text, line, words = BAD[name]
    done = with_module(applied, HEAD + text)
    assert done.code == 1, done
    hits = [f for f in done.json["findings"] if f["path"] == "vllm/delta.py" and all(w in f["why"] for w in words)]
    assert hits and (line is None or hits[0]["line"] == line), done
    shown = applied.run("verify", applied.tree, code=1).out
    assert re.search(r"^vllm/delta\.py:\d+: ", shown, re.MULTILINE)


@pytest.mark.parametrize("name", GOOD)
def test_not_found(applied, name):
    done = with_module(applied, HEAD + GOOD[name])
    assert done.code == 0, done


def test_the_template_verifies(applied):
    done = applied.run("verify", applied.tree, "--each", "--json").json
    assert done["level"] == "exact" and done["findings"] == []


def test_a_bad_line_in_an_upstream_file_is_found_and_upstream_s_own_are_not(applied):
    """Only our lines are checked: upstream's mistakes are not ours."""
    text = (applied.tree / "vllm/envs.py").read_bytes()
    commit(applied.tree, {"vllm/envs.py": text + b"\n\ndef more():\n    from vllm.distributed.parallel_state import gone\n    return gone\n"}, message("delta", "[Core] Delta"))
    applied.run("export", applied.tree)
    done = applied.run("verify", applied.tree, "--json", code=1).json
    assert [(f["path"], f["line"]) for f in done["findings"]] == [("vllm/envs.py", len((text + b"\n\ndef more():\n    ").split(b"\n")))]


def test_the_overlay_is_checked(applied):
    text = fake.OVERLAY[OVERLAY_PATH] + b"\n\ndef f():\n    from vllm.envs import nope\n    return nope\n"
    commit(applied.tree, {OVERLAY_PATH: text}, message("overlay", "[Overlay] Edit"))
    applied.run("export", applied.tree)
    applied.apply(dest=applied.room / "again")
    done = applied.run("verify", applied.room / "again", "--json", code=1).json
    assert [f["path"] for f in done["findings"]] == [OVERLAY_PATH]


def test_a_changed_touched_file(applied):
    write_files(applied.tree, {"vllm/envs.py": (applied.tree / "vllm/envs.py").read_bytes() + b"# edited\n"})
    done = applied.run("verify", applied.tree, "--json", code=1).json
    assert any(f["path"] == "vllm/envs.py" and "not committed" in f["why"] for f in done["findings"])
    git(applied.tree, "commit", "-qam", message("delta", "[Core] Delta"))
    done = applied.run("verify", applied.tree, "--json", code=1).json
    assert any(f["path"] == "vllm/envs.py" and "lock" in f["why"] for f in done["findings"])


def test_a_changed_untouched_file(applied):
    """Not what the lock describes, even though no touched file differs."""
    commit(applied.tree, {"README.md": b"mine\n"}, message("delta", "[Doc] Delta"))
    done = applied.run("verify", applied.tree, code=1)
    assert "lock" in done.out


@pytest.mark.parametrize("path", ["vllm/envs.py", OVERLAY_PATH])
def test_a_plain_directory(applied, path):
    tree = applied.room / "plain"
    shutil.copytree(applied.tree, tree, ignore=shutil.ignore_patterns(".git"))
    assert applied.run("verify", tree, "--json").json["level"] in ("touched", "exact")
    (tree / path).write_bytes(fake.FILES.get(path, b"x = 1\n") + b"# edited\n")
    done = applied.run("verify", tree, code=None)
    assert done.code in (1, 3) and path in done.out + done.err
    assert applied.run("verify", tree, "--each", code=3).code == 3


def test_upstream_s_tree_is_a_finding(project):
    done = project.run("verify", project.clone(), code=1)
    assert "no patch is applied" in done.out
    assert project.run("verify", project.index, code=3).code == 3


def test_a_git_checkout_passes_as_touched(project):
    clone = project.clone()
    project.apply(dest=clone)
    assert project.run("verify", clone, "--json").json["level"] == "touched"


def test_each_finds_a_broken_middle(applied):
    """The whole is right, a prefix is not: `gamma` needs what the next commit brings."""
    commit(applied.tree, {"vllm/one.py": (HEAD + "from vllm.two import thing\n\nthing\n").encode()}, message("one", "[Core] One"))
    commit(applied.tree, {"vllm/two.py": (HEAD + "thing = 1\n").encode()}, message("two", "[Core] Two"))
    applied.run("export", applied.tree)
    assert applied.run("verify", applied.tree).code == 0
    done = applied.run("verify", applied.tree, "--each", "--json", code=1).json
    assert [(f["path"], f["line"]) for f in done["findings"]] == [("vllm/one.py", 2)] and "after one" in done["findings"][0]["why"]


def test_apply_with_verify(project):
    done = project.apply("--verify", "--json").json
    assert done["verify"]["findings"] == []
    commit(project.tree, {"vllm/delta.py": (HEAD + "import vllm.none\n").encode()}, message("delta", "[Core] Delta"))
    project.run("export", project.tree)
    assert "vllm/delta.py:2" in project.apply("--verify", dest=project.room / "second", code=1).out


def test_verify_runs_nothing_and_writes_nothing(applied):
    write = f"open({str(applied.room / 'ran')!r}, 'w')\n"
    with_module(applied, HEAD + write)
    before = snapshot(applied.tree, skip=())
    applied.run("verify", applied.tree, "--each")
    assert snapshot(applied.tree, skip=()) == before and not (applied.room / "ran").exists()


@pytest.mark.realpin
@pytest.mark.parametrize("tag", ["v0.33.0", "v0.11.0"])
def test_the_real_stacks(tmp_path, tag):
    """Both stacks verify, prefix by prefix, and within the time that the project promises."""
    script = [sys.executable, str(fake.REPOSITORY / "apply.py")]
    subprocess.run([*script, "apply", "--ref", tag, "--dest", str(tmp_path / "tree")], check=True, capture_output=True)
    start = time.process_time(), os.times().children_user
    done = subprocess.run([*script, "verify", "--each", str(tmp_path / "tree")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.times().children_user - start[1] < 30
