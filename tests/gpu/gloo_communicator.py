# SPDX-License-Identifier: Apache-2.0
"""Collectives for several vLLM ranks on one GPU, or on the CPU, over gloo. For results, not for speed; see tests/gpu/ranks.py.

NCCL refuses two ranks on one device, and with PyNCCL off the CUDA communicator returns memory that nobody wrote. `install`
gives it collectives that copy through the host: exact for gathers, and for sums the same float32 sum in rank order on every
rank.
"""
from collections.abc import Sequence

import torch
import torch.distributed as dist


def _refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("these collectives copy through the host and cannot be captured in a CUDA graph: use enforce_eager=True")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` as flat bytes on the host; waits for the current stream."""
    _refuse_capture(x)
    return x.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def gather_rows(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor, which has `sizes[rank]` rows and `x`'s other dimensions, in rank order. Exact for every type."""
    mine = _bytes(x)
    row = x[0].numel() * x.element_size() if x.shape[0] else torch.empty(x.shape[1:], dtype=x.dtype).numel() * x.element_size()
    if mine.numel() != sizes[dist.get_rank(group)] * row:
        raise ValueError(f"rank {dist.get_rank(group)} has {x.shape[0]} rows, sizes say {sizes[dist.get_rank(group)]}")
    longest = max(sizes) * row
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [part[: n * row].to(x.device).view(x.dtype).reshape(n, *x.shape[1:]) for part, n in zip(received, sizes, strict=True)]


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, in rank order: in float32 for narrower floats, in the tensor's own type otherwise."""
    wide = torch.float32 if x.dtype.is_floating_point and x.dtype.itemsize < 4 else x.dtype
    parts = gather_rows(x.reshape(1, -1), [1] * dist.get_world_size(group), group)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(x.dtype).reshape(x.shape)


class HostCopyCommunicator:
    """The collectives of vLLM's CudaCommunicator, with its names and meaning. `self` has cpu_group, world_size and rank_in_group."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return _sum(input_, self.cpu_group)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([p.reshape(input_.shape) for p in gather_rows(input_.reshape(1, -1), [1] * self.world_size, self.cpu_group)], dim)

    def all_gatherv(self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None):
        if dim != 0:
            raise NotImplementedError("only dim 0 all-gatherv is supported")
        if isinstance(input_, list):
            return [HostCopyCommunicator.all_gatherv(self, x, dim, sizes) for x in input_]
        return torch.cat(gather_rows(input_, sizes or [input_.shape[0]] * self.world_size, self.cpu_group))

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return HostCopyCommunicator.reduce_scatterv(self, input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        total = input_.shape[dim]
        if sizes is None:
            if total % self.world_size:
                raise ValueError(f"{total} does not divide by {self.world_size}")
            sizes = [total // self.world_size] * self.world_size
        if len(sizes) != self.world_size or sum(sizes) != total:
            raise ValueError(f"sizes {sizes} do not cut {total} for {self.world_size} ranks")
        return _sum(input_, self.cpu_group).narrow(dim, sum(sizes[: self.rank_in_group]), sizes[self.rank_in_group]).contiguous()

    def reduce_scatterv_into_output(self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        return output.copy_(HostCopyCommunicator.reduce_scatterv(self, input_, dim, sizes))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self.world_size > 1:
            tensor.copy_(gather_rows(tensor.reshape(1, -1), [1] * self.world_size, self.cpu_group)[src].reshape(tensor.shape))
        return tensor


_torch_all_to_all_single = dist.all_to_all_single


def all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: list[int] | None = None, input_split_sizes: list[int] | None = None,
                      group: dist.ProcessGroup | None = None, async_op: bool = False):  # fmt: skip
    """`torch.distributed.all_to_all_single`, which gloo does not have for CUDA tensors."""
    if not input.is_cuda or dist.get_backend(group) != "gloo":
        return _torch_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    output.copy_(exchange_rows(input, output.shape[0], output_split_sizes, input_split_sizes, group or dist.group.WORLD))
    return _Done() if async_op else None


class _Done:
    """What an asynchronous collective returns, for one that was not."""

    def wait(self) -> bool:
        return True


def exchange_rows(input: torch.Tensor, rows: int, output_split_sizes: list[int] | None, input_split_sizes: list[int] | None, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank receives: `rows` rows, cut as the split sizes say (None: evenly)."""
    world, me = dist.get_world_size(group), dist.get_rank(group)
    send = list(input_split_sizes or [input.shape[0] // world] * world)
    receive = list(output_split_sizes or [rows // world] * world)
    if sum(send) != input.shape[0] or sum(receive) != rows:
        raise ValueError(f"split sizes {send} and {receive} do not fit {input.shape[0]} and {rows} rows")
    table = gather_rows(torch.tensor([send], dtype=torch.int64), [1] * world, group)
    counts = [t[0].tolist() for t in table]
    if [c[me] for c in counts] != receive:
        raise ValueError(f"rank {me} expects {receive} rows, the others send {[c[me] for c in counts]}")
    everything = gather_rows(input, [sum(c) for c in counts], group)
    return torch.cat([part.narrow(0, sum(c[:me]), c[me]) for part, c in zip(everything, counts, strict=True)])


def install() -> None:
    """Give the platform's communicator these collectives, in this process for good. Call it before a group or an engine is made."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    type(current_platform).dist_backend = "gloo"
    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    for name, method in vars(HostCopyCommunicator).items():
        if not name.startswith("_"):
            setattr(communicator, name, method)
    dist.all_to_all_single = all_to_all_single
