# SPDX-License-Identifier: Apache-2.0
"""The multi-rank harness itself: each collective against what plain indexing of all ranks' inputs says, and how it fails.

On a machine without a GPU the ranks, and vLLM's own groups in them, run on the CPU.
"""
import os
import time
import types

import pytest
import torch
import torch.distributed as dist

from tests.gpu import gloo_communicator, ranks

IMPORTED_WITH = " ".join(os.environ.get(name, "-") for name in ("RANK", "PLANTED", ranks.CHOICE))
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch):
    """Whatever GPUs there are."""
    monkeypatch.setenv(ranks.CHOICE, "gloo")


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings to a collective; small integers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.device == ranks.device(0), f"{what}: the result is on {got.device}"
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{what}: {got.dtype} {tuple(got.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
    assert got.is_contiguous() and torch.equal(got.cpu().double(), wanted.double()), what


def check_collectives(comm, rank: int, world: int) -> None:
    """Every collective of `comm`, which has the methods of vLLM's device communicators."""
    on = ranks.device(rank)
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
    on = ranks.device(rank)
    send = [[(3 * r + c) % 4 for c in range(world)] for r in range(world)]
    every = [data(r, (sum(send[r]), 5), torch.bfloat16) for r in range(world)]
    wanted = torch.cat([every[r][sum(send[r][:rank]) : sum(send[r][: rank + 1])] for r in range(world)])
    got = gloo_communicator.exchange_rows(every[rank].to(on), wanted.shape[0], [send[r][rank] for r in range(world)], send[rank], group)
    same(got, wanted, "all_to_all with uneven splits")
    if on.type == "cuda":
        output = torch.empty(wanted.shape, dtype=torch.bfloat16, device=on)
        dist.all_to_all_single(output, every[rank].to(on), [send[r][rank] for r in range(world)], send[rank], group=group)
        same(output, wanted, "torch.distributed.all_to_all_single")


def plain_rank(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    comm = gloo_communicator.HostCopyCommunicator()
    comm.cpu_group, comm.world_size, comm.rank_in_group = dist.group.WORLD, world, rank
    check_collectives(comm, rank, world)
    check_all_to_all(dist.group.WORLD, rank, world)
    dist.destroy_process_group()


def sums_rank(rank: int, world: int) -> list[float]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    comm = types.SimpleNamespace(cpu_group=dist.group.WORLD, world_size=world, rank_in_group=rank)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16).to(ranks.device(rank))
    got = gloo_communicator.HostCopyCommunicator.all_reduce(comm, x).float().cpu().tolist()
    dist.destroy_process_group()
    return got


def vllm_rank(rank: int, world: int) -> list[str]:
    with ranks.vllm_world(rank, world, dcp=world // 2):
        from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce

        tp, dcp = parallel_state.get_tp_group(), parallel_state.get_dcp_group()
        check_collectives(tp.device_communicator, rank, world)
        if dcp.world_size > 1:
            check_collectives_of_group(dcp, rank)
        same(tensor_model_parallel_all_reduce(torch.full((3,), rank + 1.0, device=ranks.device(rank))), torch.full((3,), world * (world + 1) / 2), "all_reduce of the layer")
        return [type(tp.device_communicator).__name__, dist.get_backend(tp.device_group)]


def check_collectives_of_group(group, rank: int) -> None:
    every = [data(r, (2, 3), torch.bfloat16) for r in group.ranks]
    same(group.all_gather(every[group.rank_in_group].to(ranks.device(rank)), 0), torch.cat(every), "all_gather of the DCP group")
    same(group.reduce_scatter(torch.cat(every).to(ranks.device(rank)), 0), (torch.cat(every).double() * len(every)).to(torch.bfloat16).chunk(len(every))[group.rank_in_group], "reduce_scatter of the DCP group")
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
    ranks.run_ranks(plain_rank, world)


def test_a_sum_is_the_same_on_every_rank_and_near_the_float64_one():
    got = ranks.run_ranks(sums_rank, 4)
    assert all(g == got[0] for g in got)
    wanted = sum(torch.randn(4096, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16).double() for r in range(4))
    assert (torch.tensor(got[0]).double() - wanted).abs().max() <= wanted.abs().max() * 2**-8


def test_a_rank_that_fails_is_reported_with_its_traceback():
    with pytest.raises(AssertionError, match="rank 1 failed:\n(?s:.*)ValueError: planted"):
        ranks.run_ranks(failing_rank, 2, timeout=60)


def test_a_stuck_collective_ends_by_timeout():
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 still running after 15 s: a stuck collective\?"):
        ranks.run_ranks(stuck_rank, 2, timeout=15)


def test_vllm_s_own_groups_use_these_collectives():
    for name, backend in ranks.run_ranks(vllm_rank, 4):
        assert name == ("CudaCommunicator" if torch.cuda.is_available() else "CpuCommunicator") and backend == "gloo"


# ---- NCCL or gloo


def environment_rank(rank: int, world: int) -> dict[str, str]:
    return dict(os.environ) | {"imported with": IMPORTED_WITH, "over_nccl": str(ranks.over_nccl(world)), "device": str(ranks.device(rank))}


@pytest.mark.parametrize("choice, gpus, nccl", [(None, 2, True), (None, 1, False), (None, 0, False), ("gloo", 2, False), ("nccl", 2, True)])
def test_nccl_where_every_rank_has_a_gpu(monkeypatch, choice, gpus, nccl):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv(ranks.CHOICE) if choice is None else monkeypatch.setenv(ranks.CHOICE, choice)
    assert ranks.over_nccl(2) is nccl
    assert ranks.over_nccl(1) is False


def test_what_nccl_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(ranks.CHOICE, "nccl")
    with pytest.raises(pytest.skip.Exception, match="needs 4 GPUs"):
        ranks.over_nccl(4)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with pytest.raises(RuntimeError, match="4 ranks need 4 GPUs, this machine has 2"):
        ranks.over_nccl(4)
    monkeypatch.setenv(ranks.CHOICE, "mpi")
    with pytest.raises(ValueError, match="VLLM_STACK_TEST_RANKS='mpi'"):
        ranks.over_nccl(2)


def test_ranks_are_told_before_they_import(monkeypatch, capfd):
    """The parent decides: ranks have its choice, and a rank's own numbers, when they import this module."""
    gpus = torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "set by the host")
    before = dict(os.environ)
    for choice, local_ranks in (("gloo", "00"), ("nccl", "01")):
        monkeypatch.setenv(ranks.CHOICE, choice)
        if choice == "nccl" and gpus < 2:
            break  # a rank looks itself whether its GPU is there
        found = ranks.run_ranks(environment_rank, 2, env={"PLANTED": "1"}, timeout=60)
        assert f"ranks: 2 over {choice}" in capfd.readouterr().out
        for rank, environment in enumerate(found):
            assert environment["RANK"] == str(rank) and environment["LOCAL_RANK"] == local_ranks[rank]
            assert environment["imported with"] == f"{rank} 1 {choice}"
            assert environment["over_nccl"] == str(choice == "nccl")
            assert environment["NCCL_NVLS_ENABLE"] == "set by the host" and environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
            assert environment["VLLM_DISABLE_PYNCCL"] == ("1" if choice == "gloo" else "0")
    monkeypatch.setenv(ranks.CHOICE, before[ranks.CHOICE])
    assert dict(os.environ) == before


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_of_many_tests_start_once(monkeypatch, fails):
    starts = []

    def start(fn, world, timeout):
        starts.append(world)
        if fails:
            raise AssertionError("rank 1 failed")
        return ["found"] * world

    monkeypatch.setattr(ranks, "run_dcp_ranks", start)
    for _ in range(3):
        if fails:
            with pytest.raises(AssertionError, match="rank 1 failed"):
                ranks.run_dcp_ranks_once(test_ranks_of_many_tests_start_once, 2, timeout=fails)
        else:
            assert ranks.run_dcp_ranks_once(test_ranks_of_many_tests_start_once, 2, timeout=fails) == ["found"] * 2
    assert starts == [2]
