# SPDX-License-Identifier: Apache-2.0
"""The TP, DCP, query split and CKV prefetch groups with their real communicators: gathered bytes, rank by rank.

Over NCCL nothing of vLLM is replaced. Over gloo, on one GPU or the CPU, the host-copy collectives run: that tries the groups and
this test, not the communicators.
"""
import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.gpu import ranks

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.timeout(600)]

WORLDS = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)]
TYPES = [torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32]
ENV = {"VLLM_DCP_QUERY_SPLIT": "1", "VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_CKV_PREFETCH": "1"}


def data(rank, shape, dtype, seed):
    """What `rank` of the world sends: random bytes, so of floats also NaN."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows, *row = shape
    width = torch.empty(row, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same(got, parts, what):
    wanted = torch.cat(parts)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{what}: {got.dtype} {tuple(got.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
    # Bytes, since NaN differs from itself.
    assert torch.equal(got.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), what


def check_gathers(name, group, on):
    members, me, world = group.ranks, group.rank, group.world_size
    seed = 0
    for dtype in TYPES:
        for shape in ((1, 4), (7, 3, 2), (1024, 656)):
            seed += 1
            every = [data(r, shape, dtype, seed) for r in members]
            mine = every[members.index(me)].to(on)
            same(group.all_gather(mine, 0), every, f"{name} all_gather {dtype} {shape}")
            if world > 1:
                same(group.all_gatherv(mine, 0), every, f"{name} all_gatherv {dtype} {shape}")
        for sizes in ([5, *range(1, world)], [*range(world - 1, 0, -1), 0], [0] * (world - 1) + [7], [300 * (i + 1) for i in range(world)]):
            seed += 1
            if world > 1:
                every = [data(r, (rows, 2048), dtype, seed) for r, rows in zip(members, sizes)]
                same(group.all_gatherv(every[members.index(me)].to(on), 0, sizes), every, f"{name} all_gatherv {dtype} {sizes}")


def check_bytes(name, group, on):
    """The gather of records, in memory as the prefetch has it. Returns what a GPU runs for it there, and in other memory."""
    from vllm.distributed.copy_engines import empty_for_gathers
    from vllm.v1.attention.ops.ckv_gather import all_gather_bytes

    rows = 32_768
    memory, _pool, copy_engines, waits_on_sms = empty_for_gathers(((1 + group.world_size) * rows, 656), on, group)
    for seed, count in enumerate((1, 65, 4096, rows), 300):
        every = [data(r, (count, 656), torch.uint8, seed) for r in group.ranks]
        local, gathered = memory[:count], memory[rows:][: group.world_size * count]
        local.copy_(every[group.rank_in_group])
        all_gather_bytes(gathered.view(-1), local.view(-1), group)
        same(gathered, every, f"{name} all_gather_bytes {count}")
    assert copy_engines == (group.torch_distributed_backend == "nccl")
    work = []
    for target, source in ((gathered, local), (gathered.clone(), local.clone())) if on.type == "cuda" else ():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            all_gather_bytes(target.view(-1), source.view(-1), group)
            torch.cuda.synchronize()
        work.append(" ".join(sorted({event.name for event in profile.events()})))
    return work


def check_two_streams(dcp, prefetch, on):
    """The gather of records on both communicators at once, as while a layer is looked ahead at."""
    from vllm.v1.attention.ops.ckv_gather import all_gather_bytes

    side = torch.cuda.Stream(on, priority=-1) if on.type == "cuda" else None
    results = []
    for seed in range(100, 140):
        for group, stream in ((prefetch, side), (dcp, None)):
            every = [data(r, (1 + seed % 7 * 1000, 656), torch.uint8, seed + 500 * (stream is side)) for r in group.ranks]
            local = every[group.rank_in_group].to(on)
            gathered = torch.empty(group.world_size * local.numel(), dtype=torch.uint8, device=on)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                all_gather_bytes(gathered, local.view(-1), group)
            results.append((group, every, local, gathered))
    if side is not None:
        torch.cuda.synchronize()
    for group, every, _, gathered in results:
        same(gathered.view(-1, 656), every, f"all_gather_bytes of {group.unique_name}")


def _groups(rank, tp, dcp, broken=None):
    """Of each group its members and its communicator, after gathers on all. `broken`: a group whose gathers are to be wrong."""
    from vllm.distributed import parallel_state
    from vllm.v1.attention.ops.query_split import all_gather_rows

    torch.set_num_threads(2)
    on = ranks.device(rank)
    with ranks.vllm_world(rank, tp, dcp=dcp):
        groups = {
            "tp": parallel_state.get_tp_group(),
            "dcp": parallel_state.get_dcp_group(),
            "query split": parallel_state.get_query_split_group(),
            "prefetch": parallel_state.get_ckv_prefetch_group(),
        }
        if broken is not None:
            break_gather(groups[broken])
        for name in ("tp", "dcp", "query split"):
            check_gathers(name, groups[name], on)
        work = check_bytes("prefetch", groups["prefetch"], on)
        check_two_streams(groups["dcp"], groups["prefetch"], on)
        split = groups["query split"]
        if split.world_size > 1:
            sizes = [11 + 3 * i for i in range(split.world_size)]
            every = [data(r, (n, 2048), torch.int32, 900) for r, n in zip(split.ranks, sizes)]
            same(all_gather_rows(split, every[split.rank_in_group].to(on), sizes), every, "all_gather_rows")
        found = {}
        for name, group in groups.items():
            comm = group.device_communicator
            pynccl = getattr(comm, "pynccl_comm", None)
            found[name] = {
                "ranks": group.ranks,
                "device": str(group.device),
                "backend": dist.get_backend(group.device_group),
                "class": comm and type(comm).__name__,
                "replaced": comm is not None and type(comm).all_gatherv.__module__ == "tests.gpu.gloo_communicator",
                "pynccl": pynccl.comm.value if pynccl is not None and not pynccl.disabled else None,
            }
        return found, work


def break_gather(group):
    """All ranks' shares, in the wrong order."""
    comm = group.device_communicator
    if comm is None:
        before = dist.all_gather_into_tensor
        dist.all_gather_into_tensor = lambda out, x, group: (before(out, x, group=group), out.copy_(out.roll(x.numel(), 0)))
        return
    gather, gatherv = comm.all_gather, comm.all_gatherv
    comm.all_gather = lambda x, dim=-1: gather(x, dim).roll(x.shape[0], 0)
    comm.all_gatherv = lambda x, dim=0, sizes=None: gatherv(x, dim, sizes).roll(x.shape[0], 0)


def expected_ranks(rank, tp, dcp):
    chunk = [r for r in range(tp) if r // dcp == rank // dcp]
    return {"tp": list(range(tp)), "dcp": chunk, "query split": [r for r in range(tp) if r % dcp == rank % dcp], "prefetch": chunk}


@pytest.mark.gpu
@pytest.mark.parametrize("tp, dcp", WORLDS, ids=lambda n: str(n))
def test_groups_over_nccl(tp, dcp):
    ranks.require_nccl(tp)
    for rank, (found, (registered, other)) in enumerate(ranks.run_ranks(_groups, tp, dcp, env=ENV)):
        assert {name: group["ranks"] for name, group in found.items()} == expected_ranks(rank, tp, dcp)
        prefetch = found.pop("prefetch")
        assert (prefetch["backend"], prefetch["class"], prefetch["device"]) == ("nccl", None, f"cuda:{rank}")
        # By copy engines in the prefetch's memory, and only there.
        assert "PtoP" in registered and "ncclDevKernel" not in registered, registered
        assert "ncclDevKernel" in other, other
        real = [group for group in found.values() if len(group["ranks"]) > 1]
        for group in real:
            assert (group["backend"], group["class"], group["device"], group["replaced"]) == ("nccl", "CudaCommunicator", f"cuda:{rank}", False)
        communicators = [group["pynccl"] for group in real]
        assert None not in communicators and len(set(communicators)) == len(real), "groups share an NCCL communicator"


@pytest.mark.parametrize("tp, dcp", [(2, 2), (4, 2)], ids=lambda n: str(n))
def test_groups_over_gloo(monkeypatch, tp, dcp):
    monkeypatch.setenv(ranks.CHOICE, "gloo")
    for rank, (found, _) in enumerate(ranks.run_ranks(_groups, tp, dcp, env=ENV)):
        assert {name: group["ranks"] for name, group in found.items()} == expected_ranks(rank, tp, dcp)
        assert all(group["backend"] == "gloo" and group["pynccl"] is None for group in found.values())
        assert all(group["replaced"] == (name != "prefetch" and len(group["ranks"]) > 1) for name, group in found.items())


@pytest.mark.parametrize("group", ["tp", "dcp", "query split", "prefetch"])
def test_a_wrong_order_is_seen(group):
    with pytest.raises(AssertionError, match=f"AssertionError: {group} all_gather{'_bytes 1' if group == 'prefetch' else ' torch.uint8'}"):
        ranks.run_ranks(_groups, 4, 2, group, env=ENV)
