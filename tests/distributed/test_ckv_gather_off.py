# SPDX-License-Identifier: Apache-2.0
"""Flags off: upstream's tree and ours give the same bits, on two ranks, for both layers, from the same script."""
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.timeout(300)]

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import hashlib, importlib.metadata, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: version(name).removesuffix("+cpu") if name == "vllm" else version(name)
import torch
import vllm
assert vllm.__file__.startswith(sys.argv[1]), vllm.__file__
import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed.ranks import run_ranks, vllm_world
from tests.gpu._ckv_ranks import Batch, Rank, use_torch_ops

def main(rank, world):
    from vllm.distributed import parallel_state
    use_torch_ops()
    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, 1, world)
        me = Rank(rank, world, "cpu", interleave=16, heads=16, max_tokens=64, max_model_len=512).build()
        batch = Batch([(40, 1), (129, 1), (0, 12), (64, 10)], num_decodes=2, heads=16)
        me.load(batch)
        return [hashlib.sha256(me.run(batch, layer).view(torch.uint8).numpy().tobytes()).hexdigest() for layer in ("generic", "fused")]

print("DIGESTS", run_ranks(main, 2))
"""


def digests(tree):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *os.environ["PYTHONPATH"].split(os.pathsep)[1:], str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tree)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=250)
    lines = [line for line in done.stdout.splitlines() if line.startswith("DIGESTS")]
    assert lines, done.stdout + done.stderr
    return lines[0]


def test_the_same_bits_as_upstream():
    upstream = os.environ.get("VLLM_STACK_UNPATCHED_TREE")
    if upstream is None:
        pytest.skip("VLLM_STACK_UNPATCHED_TREE is not set")
    assert digests(os.environ["PYTHONPATH"].split(os.pathsep)[0]) == digests(upstream)
