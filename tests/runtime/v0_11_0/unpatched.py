# SPDX-License-Identifier: Apache-2.0
"""Run the same probe on the tree under test and on an unpatched v0.11.0, to compare what I = 1 gives.

The unpatched tree is named by the environment variable VLLM_STACK_UNPATCHED_TREE and imported in a process of its own.
A probe is a function of this module: it takes `set_group(world, rank)` and returns named arrays.
"""
import importlib
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np

BATCHES = 1000
GROUP_USERS = {
    "slot_mappings": ["vllm.v1.worker.block_table"],
    "decode_seq_lens": ["vllm.v1.attention.backends.mla.common"],
    "context_chunks": ["vllm.v1.attention.backends.mla.common"],
}


def slot_mappings(set_group) -> dict[str, np.ndarray]:
    """Slot mappings of BATCHES random batches, with and without DCP, no interleave size given."""
    import torch
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    out = []
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        world = int(rng.integers(1, 17))
        set_group(world, int(rng.integers(0, world)))
        longest = int(rng.integers(1, 5000))
        tables = MultiGroupBlockTable(max_num_reqs=4, max_model_len=longest, max_num_batched_tokens=64, pin_memory=False,
                                      device=torch.device("cpu"), block_sizes=[int(rng.choice([1, 16, 48, 64, 128]))])
        blocks = tables[0].max_num_blocks_per_req
        for row, ids in enumerate(rng.permutation(4 * blocks).reshape(4, blocks)):
            tables.add_row((ids.tolist(), ), row)
        tables.compute_slot_mapping(rng.integers(0, 4, 64), rng.integers(0, longest, 64))
        out.append(tables[0].slot_mapping.np.copy())
    return {"slot_mapping": np.stack(out)}


def decode_seq_lens(set_group, interleave=None) -> dict[str, np.ndarray]:
    """Decode lengths that the MLA builder makes of BATCHES random batches with a DCP group of 1 to 8."""
    from tests.runtime.v0_11_0 import mla

    out = {"sizes": [], "worlds": [], "ranks": [], "lengths": [], "local": []}
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        world = int(2**rng.integers(0, 4))
        rank, decodes = int(rng.integers(0, world)), int(rng.integers(1, 9))
        set_group(world, rank)
        builder = mla.make_builder(mla.stand_in_config(world, interleave, max_model_len=64))
        lengths = rng.integers(1, 20_000, decodes)
        metadata = builder.build(0, mla.common_metadata([1] * decodes, (lengths - 1).tolist()))
        out["sizes"].append([decodes])
        out["worlds"].append([world] * decodes)
        out["ranks"].append([rank] * decodes)
        out["lengths"].append(lengths)
        out["local"].append(metadata.decode.seq_lens.numpy())
    return {name: np.concatenate(parts) for name, parts in out.items()}


def context_chunks(set_group, interleave=None) -> dict[str, np.ndarray]:
    """Chunked-context metadata of BATCHES random batches, and what the unpad step makes of a gathered workspace."""
    import torch
    from vllm.v1.attention.backends.mla.common import reorg_kvcache

    from tests.runtime.v0_11_0 import mla

    out = {name: [] for name in ("worlds", "cu_seq_lens", "starts", "seq_tot", "max_seq_lens", "seq_lens", "padded", "padded_cu", "rows")}
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        world = int(2**rng.integers(0, 4))
        set_group(world, int(rng.integers(0, world)))
        prefills = int(rng.integers(1, 6))
        context = (rng.integers(0, 3000, prefills) * rng.integers(0, 2, prefills)).tolist()
        context[int(rng.integers(0, prefills))] = int(rng.integers(1, 3000))
        builder = mla.make_builder(mla.stand_in_config(world, interleave, max_model_len=64))
        builder.chunked_prefill_workspace_size = 64 * int(rng.integers(prefills, 40))  # small: several chunks
        chunks = builder.build(0, mla.common_metadata(rng.integers(2, 9, prefills).tolist(), context)).prefill.chunked_context
        out["worlds"].append([world])
        for name in ("cu_seq_lens", "starts", "seq_tot", "max_seq_lens", "seq_lens"):
            out[name].append(np.asarray(getattr(chunks, name)).ravel())
        if world == 1:
            continue
        patched = hasattr(chunks, "padded_local_chunk_seq_lens")
        padded = chunks.padded_local_chunk_seq_lens if patched else chunks.cp_chunk_seq_lens
        out["padded"].append(np.asarray(padded).ravel())
        out["padded_cu"].append(np.asarray(chunks.padded_local_cu_seq_lens if patched else chunks.cp_cu_seq_lens).ravel())
        for i, toks in enumerate(chunks.seq_tot):
            gathered = torch.arange(world * toks).view(-1, 1, 1)
            total, longest = chunks.cu_seq_lens_lst[i][-1], chunks.max_seq_lens[i]
            if patched:
                rows = reorg_kvcache(gathered, -gathered, padded[i], chunks.local_chunk_seq_lens_allranks[i], total, longest, toks)
            else:
                rows = reorg_kvcache(gathered, -gathered, padded[i], chunks.origin_context_lens, world, total, longest, chunks.chunk_size, i, toks)
            out["rows"].append(torch.stack(rows).numpy().ravel())
    return {name: np.concatenate(parts) for name, parts in out.items()}


def set_group_in(modules, setattr_=setattr):
    """A `set_group` that replaces `get_dcp_group` in the named modules."""

    def set_group(world, rank):
        for module in map(importlib.import_module, modules):
            setattr_(module, "get_dcp_group", lambda: SimpleNamespace(world_size=world, rank_in_group=rank))

    return set_group


def run_unpatched(probe: str, out: pathlib.Path) -> dict[str, np.ndarray] | None:
    """The probe's arrays from the unpatched tree, None when no tree is named."""
    tree = os.environ.get("VLLM_STACK_UNPATCHED_TREE")
    if not tree:
        return None
    root = pathlib.Path(__file__).parents[3]
    path = os.pathsep.join([tree, str(root), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-m", __name__, probe, str(out), tree], check=True, cwd=root, env=os.environ | {"PYTHONPATH": path}, timeout=300)
    with np.load(out) as arrays:
        return dict(arrays)


if __name__ == "__main__":
    import torch
    import vllm

    from tests.runtime.v0_11_0 import mla

    name, path, tree = sys.argv[1:]
    assert pathlib.Path(tree).resolve() in pathlib.Path(vllm.__file__).resolve().parents, f"{vllm.__file__} is not the unpatched tree {tree}"
    torch.set_num_threads(1)
    torch.zeros = mla.zeros_without_pinning()
    np.savez(path, **globals()[name](set_group_in(GROUP_USERS[name])))
