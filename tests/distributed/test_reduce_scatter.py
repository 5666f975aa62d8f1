# SPDX-License-Identifier: Apache-2.0
"""CudaCommunicator.reduce_scatter where PyNCCL is off: the sums of torch.distributed, not memory that nobody wrote.

The method is vLLM's, on a stand-in for the communicator whose groups are gloo's. The stack's own DCP merge goes through it.
"""
import types

import pytest
import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.base("v0.11.0", "v0.33.0"), pytest.mark.forked, pytest.mark.timeout(300)]

SHAPES = [((8, 3), 0), ((2, 12, 5), 1), ((2, 12, 5), -2), ((3, 4), -1), ((4,), 0)]


def communicator(world, disabled, written=None):
    """What `reduce_scatter` reads. PyNCCL that is off returns at once; PyNCCL that is on notes its call."""
    pynccl = types.SimpleNamespace(disabled=disabled, reduce_scatter=lambda output, input_: None if disabled else written.append((tuple(output.shape), tuple(input_.shape))))
    return types.SimpleNamespace(world_size=world, pynccl_comm=pynccl, device_group=dist.group.WORLD)


def _reduce_scatter(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        for number, (shape, dim) in enumerate(SHAPES):
            shape = tuple(size * world if axis == dim % len(shape) else size for axis, size in enumerate(shape))
            every = [torch.randn(shape, generator=torch.Generator().manual_seed(10 * number + r)) for r in range(world)]
            found = CudaCommunicator.reduce_scatter(communicator(world, True), every[rank], dim)
            wanted = torch.stack(every).sum(0).chunk(world, dim)[rank]
            torch.testing.assert_close(found, wanted)
            assert found.is_contiguous()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_sums_without_pynccl(world):
    run_ranks(_reduce_scatter, world, timeout=200)


def test_with_pynccl_nothing_changes(monkeypatch):
    """The flag off: PyNCCL gets what it got, torch.distributed nothing."""
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda *args, **kwargs: pytest.fail("PyNCCL is on"))
    written = []
    found = CudaCommunicator.reduce_scatter(communicator(2, False, written), torch.zeros(3, 4), 1)
    assert written == [((2, 3), (4, 3))] and found.shape == (3, 2)
