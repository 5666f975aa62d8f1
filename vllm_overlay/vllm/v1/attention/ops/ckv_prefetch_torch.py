# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""The CKV prefetch on torch: what travels, through which buffers, on which stream.

`ckv_prefetch.py` says when; `ckv_gather.py` calls `CKVPrefetcher` for each layer of a
batch that gathers.

The side stream sends the history in the layout of the whole batch, with holes where
late rows belong (`ckv_prefetch_plan`), straight into its final place. When the layer
runs, every rank packs those records, written to its paged cache by now, one small
all-gather exchanges them, and a copy fills the holes. Late rows cost their bytes once
more, as holes, but no history is moved twice and the layout stays that of the
synchronous gather. A layer that was not looked ahead at, like the first of a step, gathers
everything on the side stream.

All of it is on one communicator, the prefetch group's, so it has one order, and the
main stream waits once, right before it reads the buffer. Late rows, too: the DCP group's
communicator belongs to the main stream, where the indexer exchanges its candidates.
Measured, two H200 with NVLink, DCP 2, 64k tokens, chunks of 2048, a gather of 119 us: it
makes the layer 22 us longer with the chunk on the DCP group's communicator, and not
longer than the noise of 5 us with it on this one, as if it was not sent at all.

A layer begins, and starts the next layer's history, as soon as its chunk is in the
cache. In DeepSeek-V3.2's attention that is before the indexer (`early`), which is bound
by arithmetic: what travels beside it costs less than beside sparse attention, which is
bound by memory. The same gather makes the layer 20 us longer if it starts at attention.
That holds for gathers by copy engines (`vllm.distributed.copy_engines`). NCCL's kernels
hold SMs, and the indexer's, which wants one thread block on every SM, waits for them: up
to 188 us longer, against 35 to 47 us from a start at attention. So without copy engines
a layer begins when it attends. (Trials, all of them; `bench/bench_several_gpus.py
--late` starts at attention, too.)

Why records and not the latent, which every rank has: a rank could quantize the whole
chunk itself and save the exchange. But then the bytes are right only as long as two
code paths quantize alike (the cache writer fuses norm and rope, and differs by model,
format and scale), and it holds the layer's activations. Records are right by
construction. The exchange is 1 / W of the chunk per rank: 0.7 MB of the 5.4 MB that a
rank sends for 64k tokens of context at W = 8, and chunks of 8k tokens.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from vllm.v1.attention.ops.ckv_copy import CKVSegments, copy_ckv_segments
from vllm.v1.attention.ops.ckv_prefetch import (
    NUM_BUFFERS,
    CKVPrefetchState,
    LayerKey,
    Lease,
    layer_key,
    register_lane,
)
from vllm.v1.attention.ops.ckv_prefetch_plan import next_step

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class CUDAStreams:
    """`Streams` of a lane on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        # High priority: the copies of records are short, but of no use if they get
        # SMs only after the attention that they should hide behind.
        self._side = torch.cuda.Stream(device, priority=-1)

    def main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._side.device)

    def side(self) -> torch.cuda.Stream:
        return self._side

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def use_side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)


class InlineStreams:
    """`Streams` of a device without streams: everything runs as it is enqueued."""

    def main(self) -> None:
        return None

    def side(self) -> None:
        return None

    def record(self, stream: None) -> bool:
        return True

    def wait(self, stream: None, event: bool) -> None:
        pass

    def synchronize(self, event: bool) -> None:
        pass

    def use_side(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CKVPrefetcher:
    """Prefetching gather of one lane: its buffers, and the layers it has seen.

    Args:
        buffers: NUM_BUFFERS times uint8 [W * rows per rank, record].
        page_rows: rows per page in which kernels see a buffer.
        group: the ranks of the DCP group with a communicator of their own.
        early: a layer may begin before its indexer, see above. The same on all ranks.

    """

    def __init__(
        self,
        buffers: list[torch.Tensor],
        page_rows: int,
        group: "GroupCoordinator",
        early: bool,
    ) -> None:
        assert len(buffers) == NUM_BUFFERS, (
            f"The CKV prefetch has {NUM_BUFFERS} buffers, not {len(buffers)}."
        )
        device = buffers[0].device
        self.buffers = buffers
        self.page_rows = page_rows
        self.group = group
        self.early = early
        self.streams = CUDAStreams(device) if device.type == "cuda" else InlineStreams()
        self.state = CKVPrefetchState(self.streams)
        # Layers, not their caches: a cache is looked up when it is read, so a binding
        # that changed cannot be missed. Weak: a lane must not keep a model alive.
        self._layers: dict[LayerKey, weakref.ref[Any]] = {}
        self._layer: Any = None
        self._lease: Lease | None = None
        self._failure: str | None = None
        register_lane(self)
        # A buffer as one request's pages.
        self._pages = torch.arange(
            buffers[0].shape[0] // page_rows, dtype=torch.int32, device=device
        ).view(1, -1)
        if device.type == "cuda":
            # Compile before the KV cache is sized and the first prompt waits.
            nothing = self._pages.new_zeros((1, 4))
            copy_ckv_segments(
                self._paged(buffers[0]),
                self._pages,
                CKVSegments(nothing, 0),
                buffers[1],
            )

    def _paged(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(-1, self.page_rows, buffer.shape[-1])

    def enter(self, layer: Any) -> None:
        """`begin` and `complete` are about `layer` until the end of its `attending`.

        Args:
            layer: an attention layer with `layer_name` and `kv_cache`.

        Raises:
            RuntimeError: an earlier step failed and the device with it.

        """
        if self._failure is not None:
            self._recover()
        self._leave()  # of a layer that did not attend
        self._layer = layer

    def _leave(self) -> None:
        self._layer = None
        lease, self._lease = self._lease, None
        if lease is not None:
            self.state.release(lease)

    @contextmanager
    def attending(self, layer: Any) -> Iterator[None]:
        """The work of `layer` inside reads what is gathered for it. Enters it, unless
        it was entered before.
        """
        if self._layer is not layer:
            self.enter(layer)
        try:
            yield
        finally:
            self._leave()

    @property
    def begun(self) -> bool:
        """The layer that was entered has its buffer."""
        return self._lease is not None

    def begin(
        self,
        kv_cache: torch.Tensor,
        plan: Any,
        workspace: Any,
        gather_now: Callable[..., torch.Tensor],
        all_gather: Callable[..., None],
    ) -> None:
        """Enqueue this layer's gather, or what the prefetch left of it, and then that
        of the next layer's history. `complete` must follow. Collective over the
        prefetch group.

        Args:
            kv_cache: [blocks, block_size, record] of one-byte elements, this layer's,
                the batch's tokens written.
            plan: the batch's `CKVGatherPlan`. One without a plan in `prefetch`, as of a
                one-layer draft in its target's lane, is a step without lookahead.
            workspace: `CKVGatherWorkspace`, whose `gathered` becomes the buffer used.
            gather_now: the synchronous gather, in the current stream's order.
            all_gather: gathers bytes, likewise.

        Raises:
            RuntimeError: no layer was entered, or it has begun.

        """
        if self._layer is None:
            raise RuntimeError("CKV prefetch: a gather outside of any layer.")
        key = layer_key(self._layer.layer_name)
        step = next_step() if plan.prefetch is None else plan.prefetch.step
        self.state.begin_step(step)
        self._lease = lease = self.state.consume(key)
        if key is not None:
            self._layers[key] = weakref.ref(self._layer)
        workspace.gathered = self.buffers[lease.buffer]
        with self.streams.use_side():
            if lease.prefetched:
                self._append_late_rows(kv_cache, plan, lease, all_gather)
            else:
                gather_now(kv_cache, plan, workspace, self.group)
            self.state.filled(lease, keep=plan)
            self._look_ahead(plan, all_gather)

    def complete(self) -> None:
        """What is enqueued on the main stream from now on may read the gathered buffer.

        Raises:
            RuntimeError: before `begin`.

        """
        if self._lease is None:
            raise RuntimeError("CKV prefetch: completion without a gather.")
        self.state.complete(self._lease)

    def _append_late_rows(
        self,
        kv_cache: torch.Tensor,
        plan: Any,
        lease: Lease,
        all_gather: Callable[..., None],
    ) -> None:
        """Fill the holes of a prefetched buffer with the records that were late."""
        tables = plan.prefetch.tables
        # Nobody else uses it between consume and prepare. A rank's late rows are part
        # of its share, so they fit.
        scratch = self.buffers[lease.scratch]
        received = scratch[: plan.dcp_world_size * tables.late_rows]
        mine = received[plan.dcp_rank * tables.late_rows :][: tables.late_rows]
        copy_ckv_segments(
            kv_cache.view(torch.uint8), plan.block_table, tables.pack, mine
        )
        all_gather(received.view(-1), mine.view(-1), self.group)
        copy_ckv_segments(
            self._paged(scratch),
            self._pages,
            tables.scatter,
            self.buffers[lease.buffer],
        )

    def _look_ahead(self, plan: Any, all_gather: Callable[..., None]) -> None:
        """Start the gather of the next layer's history."""
        tables = None if plan.prefetch is None else plan.prefetch.tables
        key = None if tables is None else self.state.next_layer()
        if key is None:
            return
        layer = self._layers[key]()
        assert layer is not None, f"layer {key} is gone while its model runs"
        ticket = self.state.prepare(key)
        gathered = self.buffers[ticket.buffer][: plan.gathered_rows]
        mine = plan.own_share(gathered)
        copy_ckv_segments(
            layer.kv_cache.view(torch.uint8),
            plan.block_table,
            tables.history,
            mine,
        )
        mine[plan.local_rows :].zero_()
        all_gather(gathered.view(-1), mine.view(-1), self.group)
        self.state.finish(ticket, keep=plan)

    def end_step(self) -> None:
        """See `ckv_step`."""
        if self._failure is None:
            self._leave()  # of a layer that did not attend
            self.state.end_step()

    def fail(self, error: BaseException) -> None:
        """See `ckv_step`. Only notes it: nothing may hide the error that is raised."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"

    def _recover(self) -> None:
        """Take up work after a step that failed anywhere, perhaps half enqueued."""
        failure = self._failure
        try:
            # Of what was enqueued when it failed, the state may not know.
            self.streams.synchronize(self.streams.record(self.streams.side()))
            self.reset()
        except RuntimeError as error:
            raise RuntimeError(
                "The CKV prefetch cannot go on after an earlier step failed with "
                f"{failure}"
            ) from error

    def reset(self) -> None:
        """Wait for all gathers and forget the layers. For changed cache bindings."""
        self.state.reset()
        self._layers.clear()
        self._layer = self._lease = self._failure = None

    def close(self) -> None:
        """`reset`, and refuse further use."""
        self.reset()
        self.state.close()
