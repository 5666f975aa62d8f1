# SPDX-License-Identifier: Apache-2.0
"""The multi-rank harness itself: each collective against what plain indexing of all ranks' inputs says.

On a machine without a GPU the same collectives run on CPU tensors; the test of vLLM's own groups needs a GPU.
"""
import time
import types

import pytest
import torch
import torch.distributed as dist

from tests.gpu import one_gpu_ranks as harness

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.int64]


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings to a collective; small integers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.device.type == harness.device().type, f"{what}: the result is on {got.device}"
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{what}: {got.dtype} {tuple(got.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
    assert got.is_contiguous() and torch.equal(got.cpu().double(), wanted.double()), what


def check_collectives(comm, rank: int, world: int) -> None:
    """Every collective of `comm`, which has the methods of vLLM's device communicators."""
    on = harness.device()
    for dtype in TYPES:
        shape = (3, 2 * world, 4)
        every = [data(r, shape, dtype) for r in range(world)]
        mine = every[rank].to(on)
        for dim in (0, 1, -1):
            same(comm.all_gather(mine, dim), torch.cat(every, dim), f"all_gather {dtype} dim {dim}")
        if dtype != torch.float8_e4m3fn:
            total = sum(x.double() for x in every).to(dtype)
            same(comm.all_reduce(mine), total, f"all_reduce {dtype}")
            same(mine, every[rank], f"all_reduce {dtype} changed its input")
            same(comm.reduce_scatter(mine, 1), total.chunk(world, 1)[rank].contiguous(), f"reduce_scatter {dtype}")
            sizes = [2 * world - 1] + [1] + [0] * (world - 2)
            wanted = total[:, sum(sizes[:rank]) : sum(sizes[: rank + 1])].contiguous()
            same(comm.reduce_scatterv(mine, 1, sizes), wanted, f"reduce_scatterv {dtype} {sizes}")
        for sizes in ([5, *range(world - 1)], [0] * (world - 1) + [7], [2] * world):
            uneven = [data(r, (n, 6), dtype) for r, n in enumerate(sizes)]
            same(comm.all_gatherv(uneven[rank].to(on), 0, sizes), torch.cat(uneven), f"all_gatherv {dtype} {sizes}")
        both = comm.all_gatherv([mine, mine[:, 0].contiguous()], 0, [3] * world)
        same(both[1], torch.cat([x[:, 0] for x in every]), f"all_gatherv {dtype} of a list")
        same(comm.broadcast(mine.clone(), world - 1), every[world - 1], f"broadcast {dtype}")
    strided = data(rank, (4, 6), torch.float32).to(on).t()
    same(comm.all_gather(strided, 0), torch.cat([data(r, (4, 6), torch.float32).t() for r in range(world)]), "all_gather of a transposed tensor")


def check_all_to_all(group, rank: int, world: int) -> None:
    on = harness.device()
    send = [[(3 * r + c) % 4 for c in range(world)] for r in range(world)]
    every = [data(r, (sum(send[r]), 5), torch.bfloat16) for r in range(world)]
    wanted = torch.cat([every[r][sum(send[r][:rank]) : sum(send[r][: rank + 1])] for r in range(world)])
    got = harness.exchange_rows(every[rank].to(on), wanted.shape[0], [send[r][rank] for r in range(world)], send[rank], group)
    same(got, wanted, "all_to_all with uneven splits")
    if on.type == "cuda":
        output = torch.empty(wanted.shape, dtype=torch.bfloat16, device=on)
        dist.all_to_all_single(output, every[rank].to(on), [send[r][rank] for r in range(world)], send[rank], group=group)
        same(output, wanted, "torch.distributed.all_to_all_single")


def plain_rank(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    comm = harness.OneGpuCommunicator()
    comm.cpu_group, comm.world_size, comm.rank_in_group = dist.group.WORLD, world, rank
    check_collectives(comm, rank, world)
    check_all_to_all(dist.group.WORLD, rank, world)
    dist.destroy_process_group()


def sums_rank(rank: int, world: int) -> list[float]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    comm = types.SimpleNamespace(cpu_group=dist.group.WORLD, world_size=world, rank_in_group=rank)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16).to(harness.device())
    got = harness.OneGpuCommunicator.all_reduce(comm, x).float().cpu().tolist()
    dist.destroy_process_group()
    return got


def vllm_rank(rank: int, world: int) -> list[str]:
    with harness.vllm_world(rank, world):
        from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world, decode_context_model_parallel_size=world // 2)
        tp, dcp = parallel_state.get_tp_group(), parallel_state.get_dcp_group()
        check_collectives(tp.device_communicator, rank, world)
        if dcp.world_size > 1:
            check_collectives_of_group(dcp, rank)
        same(tensor_model_parallel_all_reduce(torch.full((3,), rank + 1.0, device=harness.device())), torch.full((3,), world * (world + 1) / 2), "all_reduce of the layer")
        return [type(tp.device_communicator).__name__, dist.get_backend(tp.device_group)]


def check_collectives_of_group(group, rank: int) -> None:
    every = [data(r, (2, 3), torch.bfloat16) for r in group.ranks]
    same(group.all_gather(every[group.rank_in_group].to(harness.device()), 0), torch.cat(every), "all_gather of the DCP group")
    same(group.reduce_scatter(torch.cat(every).to(harness.device()), 0), (torch.cat(every).double() * len(every)).to(torch.bfloat16).chunk(len(every))[group.rank_in_group], "reduce_scatter of the DCP group")
    check_all_to_all(group.device_group, group.rank_in_group, group.world_size)


def failing_rank(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.init_process_group("gloo", rank=rank, world_size=world)  # waits for rank 1


def stuck_rank(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if rank == 1:
        time.sleep(600)  # alive, so that its connection stays open
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_collective_is_right(world):
    harness.run_ranks(plain_rank, world)


def test_a_sum_is_the_same_on_every_rank_and_near_the_float64_one():
    got = harness.run_ranks(sums_rank, 4)
    assert all(g == got[0] for g in got)
    wanted = sum(torch.randn(4096, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16).double() for r in range(4))
    assert (torch.tensor(got[0]).double() - wanted).abs().max() <= wanted.abs().max() * 2**-8


def test_a_rank_that_fails_is_reported_with_its_traceback():
    with pytest.raises(AssertionError, match="rank 1 failed:\n(?s:.*)ValueError: planted"):
        harness.run_ranks(failing_rank, 2, timeout=60)


def test_a_stuck_collective_ends_by_timeout():
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 still running after 15 s: a stuck collective\?"):
        harness.run_ranks(stuck_rank, 2, timeout=15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_vllm_s_own_groups_use_these_collectives():
    for name, backend in harness.run_ranks(vllm_rank, 4):
        assert name == "CudaCommunicator" and backend == "gloo"
