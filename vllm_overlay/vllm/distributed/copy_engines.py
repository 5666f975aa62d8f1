# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""NCCL all-gathers by the GPU's copy engines, for transfers beside a layer that computes.

NCCL gathers with a kernel whose thread blocks hold SMs, also while they wait for a
peer. Beside a matmul of 1.42 ms on two H200 with NVLink, an all-gather of 43 MB per
rank (0.19 ms alone) makes the matmul 0.12 ms longer, which is more than half of what
running it early could win; by copy engines 0.001 ms (the section `beside` of
bench/bench_several_gpus.py).

NCCL uses copy engines for an all-gather if three things come together: NCCL 2.28, a
communicator with NCCL_CTA_POLICY_ZERO, and both buffers in memory of NCCL's allocator
that is registered as a symmetric window. And the GPUs of the group must have direct
access to each other's memory.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.distributed.utils import get_distributed_timeout_or_none
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)

MIN_NCCL_VERSION = (2, 28)

# Thread blocks of NCCL's kernel, where one gathers after all: each holds an SM. Two H200
# with NVLink, DCP 2, 64k tokens: a layer beside the gather is 4 to 12 us shorter than
# with as many as NCCL chooses. With 8 it is within 5 us of that, as far as noise lets
# one tell, but a gather that nothing hides takes 12 to 95 us longer (trials).
MAX_CTAS = 16


def _is_nccl(backend: str) -> bool:
    return "nccl" in str(backend).replace(",", ":").split(":")


def _no_support(backend: str) -> str | None:
    """Why no communicator can use copy engines, from facts of the whole world."""
    if not _is_nccl(backend):
        return f"the backend is {backend}"
    version = torch.cuda.nccl.version()
    if version < MIN_NCCL_VERSION or not hasattr(
        dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"
    ):
        return f"NCCL {'.'.join(map(str, version))} has none, 2.28 has"
    return None


def prefer_copy_engines(group: "GroupCoordinator") -> None:
    """Give `group` a device group that gathers by copy engines, or else with at most
    MAX_CTAS thread blocks. Collective over the world: every rank calls it for the same
    groups.

    Does nothing where NCCL has no such all-gather, or the backend is another.

    Args:
        group: without a device communicator, which would have another NCCL
            communicator, with NCCL's kernels.

    """
    assert group.device_communicator is None, (
        f"{group.unique_name} has a device communicator, with NCCL's kernels."
    )
    if _no_support(group.torch_distributed_backend) is not None:
        return
    stock = group.device_group
    for ranks in group.group_ranks:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        options.config.max_ctas = MAX_CTAS
        device_group = dist.new_group(
            ranks,
            backend="nccl",
            timeout=get_distributed_timeout_or_none(),
            pg_options=options,
        )
        if group.rank in ranks:
            group.device_group = device_group
    dist.destroy_process_group(stock)
    # Connects. Memory can be registered with a communicator that exists.
    dist.all_reduce(torch.zeros(1, device=group.device), group=group.device_group)


class GatherMemory(NamedTuple):
    """memory: uint8, contiguous. pool: must live as long as it does. copy_engines:
    gathers in it take no SMs. waits_on_sms: they are NCCL kernels, which hold SMs
    while they wait for a peer whose memory this GPU reaches. Both on all ranks alike."""

    memory: torch.Tensor
    pool: Any
    copy_engines: bool
    waits_on_sms: bool


def empty_for_gathers(
    shape: tuple[int, ...],
    device: torch.device,
    group: "GroupCoordinator",
    sleeps_in: Callable[[], AbstractContextManager] | None = None,
) -> GatherMemory:
    """Uninitialized bytes whose all-gathers over `group` go by copy engines, if any
    can.

    Collective over `group`: the same shape on all ranks, and gathers at the same
    offsets. Says in one log line what it found.

    Args:
        shape: of the result.
        device: of the result.
        group: see `prefer_copy_engines`.
        sleeps_in: for memory that sleep mode discards, the context that allocates it.
            NCCL's allocator keeps its memory, so then no copy engines.

    """
    backend_name = group.torch_distributed_backend
    refusal = _no_support(backend_name)
    waits_on_sms = _is_nccl(backend_name)
    if waits_on_sms and all(in_the_same_node_as(group.cpu_group)):
        if not _on_all_ranks(_reaches_peers(device, group), group):
            waits_on_sms = False
            refusal = refusal or "its GPUs lack direct access to each other's memory"
    elif refusal is None:
        refusal = "its ranks are on several nodes"
    if refusal is None and sleeps_in is not None:
        refusal = "sleep mode is to free its memory"
    pool = None
    if refusal is None:
        backend = group.device_group._get_backend(device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            memory = torch.empty(shape, dtype=torch.uint8, device=device)
        if _on_all_ranks(_is_in(pool, memory), group):
            backend.register_mem_pool(pool, symm=True)
        else:
            refusal = "another memory pool is in use"
    else:
        with nullcontext() if sleeps_in is None else sleeps_in():
            memory = torch.empty(shape, dtype=torch.uint8, device=device)
    if refusal is None:
        logger.info_once("%s gathers by copy engines.", group.unique_name)
    else:
        logger.info_once(
            "%s does not gather by copy engines: %s.", group.unique_name, refusal
        )
    return GatherMemory(
        memory, pool, refusal is None, refusal is not None and waits_on_sms
    )


def _on_all_ranks(fact: bool, group: "GroupCoordinator") -> bool:
    """Whether `fact` holds on every rank: to register memory is collective."""
    agreed = torch.tensor([int(fact)])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return bool(agreed)


def _reaches_peers(device: torch.device, group: "GroupCoordinator") -> bool:
    """Whether this rank's GPU has direct access to those of the other ranks, as far as
    this process sees them. Collective over `group`.
    """
    ordinals = [torch.empty(1, dtype=torch.int64) for _ in range(group.world_size)]
    dist.all_gather(ordinals, torch.tensor([device.index]), group=group.cpu_group)
    return all(
        torch.cuda.can_device_access_peer(device, peer)
        for peer in map(int, ordinals)
        if peer != device.index and peer < torch.cuda.device_count()
    )


def _is_in(pool: Any, memory: torch.Tensor) -> bool:
    """Whether `memory` came out of `pool`: an outer pool's allocator goes first."""
    first = memory.data_ptr()
    return any(
        segment["address"] <= first < segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )
