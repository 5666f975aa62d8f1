# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""The CKV prefetch on torch: what travels, through which buffers, on which stream.

`ckv_prefetch.py` says when; `ckv_gather.py` calls `CKVPrefetcher` for each layer of a
batch that gathers.

The side stream sends the history in the layout of the whole batch, with holes where
the current chunk belongs, straight into its final place. When the layer runs, every
rank packs the records that it just wrote to its paged cache, one small all-gather
exchanges them, and a copy fills the holes. The chunk costs its bytes once more, as
holes, but no history is moved twice and the layout stays that of the synchronous
gather. A layer that was not looked ahead at, like the first of a step, gathers
everything on the side stream.

All of it is on one communicator, the prefetch group's, so it has one order, and the
main stream waits once, right before it reads the buffer. The chunk, too: the DCP group's
communicator belongs to the main stream, where the indexer exchanges its candidates.
Measured, two H200 with NVLink, DCP 2, 64k tokens, chunks of 2048, a gather of 119 us: it
makes the layer 22 us longer with the chunk on the DCP group's communicator, and not
longer than the noise of 5 us with it on this one, as if the chunk was not sent at all.

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

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.ckv_copy import CKVSegments, copy_ckv_segments
from vllm.v1.attention.ops.ckv_prefetch import (
    NUM_BUFFERS,
    CKVPrefetchState,
    LayerKey,
    Lease,
    layer_key,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)

# Tokens of history, summed over the batch, from which looking ahead is worth its extra
# launches and its second all-gather.
CKV_PREFETCH_MIN_HISTORY = 2048

# KV connectors whose `wait_for_layer_load` does nothing: what they load is in place
# before the forward pass begins, so the next layer's history may be read early.
CONNECTORS_NOT_LAYERWISE = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "HF3FSKVConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MoRIIOConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)


# --------------------------------------------------------------------------- switch


def _layerwise_connector(config: "KVTransferConfig") -> str | None:
    """The first connector that may load KV layer by layer, also in a MultiConnector."""
    if config.kv_connector == "MultiConnector":
        for child in config.kv_connector_extra_config.get("connectors", []):
            name = child.get("kv_connector")
            if (
                name not in CONNECTORS_NOT_LAYERWISE
                or child.get("kv_connector_module_path") is not None
            ):
                return str(name)
        return None
    if (
        config.kv_connector in CONNECTORS_NOT_LAYERWISE
        and config.kv_connector_module_path is None
    ):
        return None
    return config.kv_connector


def ckv_prefetch_refusal(vllm_config: "VllmConfig") -> str | None:
    """Why the CKV gather of this engine does not prefetch; None: it does.

    Args:
        vllm_config: of an engine with the CKV gather on and DCP > 1.

    """
    parallel_config = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    if not envs.VLLM_DCP_CKV_PREFETCH:
        return "VLLM_DCP_CKV_PREFETCH=0"
    if not envs.VLLM_DCP_CKV_GATHER:
        return "its process group exists only with VLLM_DCP_CKV_GATHER=1"
    if parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism"
    if parallel_config.use_ubatching:
        return "dual batch overlap"
    if transfer is not None and transfer.kv_connector is not None:
        connector = _layerwise_connector(transfer)
        if connector is not None:
            return f"the KV connector {connector} may load KV layer by layer"
    if vllm_config.model_config.get_num_layers(parallel_config) < 2:
        return "a single layer"
    return None


def ckv_prefetch_enabled(vllm_config: "VllmConfig", gather: bool) -> bool:
    """Whether the CKV gather prefetches. Says so in one log line at start.

    Args:
        gather: the CKV gather is on and DCP > 1.

    """
    if not gather:
        # On by default: only whoever set it is to hear that it does nothing.
        if envs.is_set("VLLM_DCP_CKV_PREFETCH") and envs.VLLM_DCP_CKV_PREFETCH:
            logger.warning_once(
                "VLLM_DCP_CKV_PREFETCH=1 has no effect: the prefetch works only with "
                "VLLM_DCP_CKV_GATHER=1 and decode_context_parallel_size > 1."
            )
        return False
    refusal = ckv_prefetch_refusal(vllm_config)
    if refusal is None:
        logger.info_once("DCP CKV prefetch is on.")
    else:
        logger.info_once("DCP CKV prefetch is off: %s.", refusal)
    return refusal is None


# ----------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class CKVChunkTables:
    """How history and current chunk of a batch come together.

    history: from this rank's paged cache into its share, chunk rows left out.
    pack: this rank's chunk records from its paged cache, request by request.
    scatter: all ranks' packed records, received at stride `chunk_rows`, into the
        holes of the gathered buffer.
    chunk_rows: the most chunk records that a rank has.
    """

    history: CKVSegments
    pack: CKVSegments
    scatter: CKVSegments
    chunk_rows: int


@dataclass(frozen=True)
class CKVPrefetchPlan:
    """The prefetch of one step.

    step: never repeats in this process. tables: None if this step does not look ahead.
    """

    step: int
    tables: CKVChunkTables | None


_steps = itertools.count()


def ckv_chunk_segments(
    rank_req_lens: np.ndarray,
    history_lens: np.ndarray,
    rank_req_starts: np.ndarray,
    padded_total: int,
    dcp_rank: int,
) -> tuple[list[np.ndarray], int]:
    """The segments of `CKVChunkTables` (history, pack, scatter) and `chunk_rows`.

    A request's chunk is its last positions, `seq_len - chunk_len + offset`, never
    counted across requests. On a rank they are the last rows of the request, behind
    the `history_lens` rows that its context has there. Host only.

    Args:
        rank_req_lens: integers [W, R], rows that each rank has of each request.
        history_lens: integers [W, R], those of earlier steps among them.
        rank_req_starts: integers [W, R], first row of the request in the rank's share.
        padded_total: rows of every rank's share.
        dcp_rank: this rank.

    Returns:
        Three int32 arrays [segments, 4] without empty segments, and `chunk_rows`.

    Raises:
        ValueError: unequal shapes, or more history than rows.

    """
    shape = rank_req_lens.shape
    if history_lens.shape != shape or rank_req_starts.shape != shape:
        raise ValueError(
            f"Shapes differ: {shape}, {history_lens.shape}, {rank_req_starts.shape}."
        )
    chunk_lens = rank_req_lens - history_lens
    if (chunk_lens < 0).any():
        raise ValueError("A rank cannot have more history of a request than rows.")
    world_size, num_reqs = shape
    requests = np.arange(num_reqs)
    chunk_starts = np.cumsum(chunk_lens, axis=1) - chunk_lens
    chunk_rows = int(chunk_lens.sum(axis=1).max())
    ranks = np.arange(world_size)[:, None]

    def segments(*columns: Any) -> np.ndarray:
        table = np.stack([np.ravel(c) for c in np.broadcast_arrays(*columns)], axis=1)
        return table[table[:, 3] > 0].astype(np.int32)

    me = dcp_rank
    return [
        segments(requests, 0, rank_req_starts[me], history_lens[me]),
        segments(requests, history_lens[me], chunk_starts[me], chunk_lens[me]),
        segments(
            0,
            ranks * chunk_rows + chunk_starts,
            ranks * padded_total + rank_req_starts + history_lens,
            chunk_lens,
        ),
    ], chunk_rows


def plan_ckv_prefetch(
    layout: Any,
    history_lens: np.ndarray,
    history_tokens: int,
    exact: bool,
    dcp_rank: int,
    device: torch.device,
) -> CKVPrefetchPlan:
    """The step's prefetch, from facts that all ranks share.

    Args:
        layout: the batch's `CKVLayout`.
        history_lens: int32 [W, R], the context's share of `layout.rank_req_lens`.
        history_tokens: context summed over requests.
        exact: host lengths are exact. An upper bound would count rows as history that
            this step writes.

    """
    step = next(_steps)
    if not exact or history_tokens < max(CKV_PREFETCH_MIN_HISTORY, 1):
        return CKVPrefetchPlan(step, None)
    parts, chunk_rows = ckv_chunk_segments(
        layout.rank_req_lens,
        history_lens,
        layout.rank_req_starts,
        layout.padded_total,
        dcp_rank,
    )
    # One copy to the device.
    table = async_tensor_h2d(np.concatenate(parts), device=device)
    history, pack, scatter = (
        CKVSegments(rows, int(part[:, 3].max(initial=0)))
        for rows, part in zip(table.split([len(part) for part in parts]), parts)
    )
    return CKVPrefetchPlan(step, CKVChunkTables(history, pack, scatter, chunk_rows))


# ------------------------------------------------------------------------- prefetch


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
        assert len(buffers) == NUM_BUFFERS
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

        """
        self._leave()  # of a layer that failed before it attended
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
        step = next(_steps) if plan.prefetch is None else plan.prefetch.step
        self.state.begin_step(step)
        self._lease = lease = self.state.consume(key)
        if key is not None:
            self._layers[key] = weakref.ref(self._layer)
        workspace.gathered = self.buffers[lease.buffer]
        with self.streams.use_side():
            if lease.prefetched:
                self._append_chunk(kv_cache, plan, lease, all_gather)
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

    def _append_chunk(
        self,
        kv_cache: torch.Tensor,
        plan: Any,
        lease: Lease,
        all_gather: Callable[..., None],
    ) -> None:
        """Fill the holes of a prefetched buffer with the current chunk's records."""
        tables = plan.prefetch.tables
        # Nobody else uses it between consume and prepare. A rank's chunk is part of
        # its share, so it fits.
        scratch = self.buffers[lease.scratch]
        received = scratch[: plan.dcp_world_size * tables.chunk_rows]
        mine = received[plan.dcp_rank * tables.chunk_rows :][: tables.chunk_rows]
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

    def reset(self) -> None:
        """Wait for all gathers and forget the layers. For changed cache bindings."""
        self.state.reset()
        self._layers.clear()
        self._layer = self._lease = None

    def close(self) -> None:
        """`reset`, and refuse further use."""
        self.reset()
        self.state.close()
