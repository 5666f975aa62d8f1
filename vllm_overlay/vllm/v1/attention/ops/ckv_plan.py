# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""The CKV gather of a step: which rows gather, whether they do, and where all lies.

Decided once per step, in the metadata builder, from facts that all ranks share: host
lengths, host block tables, config. Only the part that a rank takes for itself differs.
`ckv_gather` holds the workspace and the collectives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig
from vllm.v1.attention.ops.ckv_layout import CKV_PAGE_ROWS, ckv_layout
from vllm.v1.attention.ops.ckv_prefetch import in_ckv_capture
from vllm.v1.attention.ops.ckv_prefetch_plan import (
    CKV_PREFETCH_MIN_HISTORY,
    CKVPrefetchPlan,
    looks_ahead,
    plan_ckv_prefetch,
    split_history,
)
from vllm.v1.attention.ops.ckv_remap import warm_up_remap
from vllm.v1.attention.ops.dcp_cost import (
    KernelTimes,
    exchange_seconds,
    gather_seconds,
)
from vllm.v1.attention.ops.step_writes import HostBlockTable, rows_written_by_batch
from vllm.v1.metrics.dcp_steps import count_prefill_batch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

logger = init_logger(__name__)


# ---------------------------------------------------------------------- eligibility


def gathered_requests(
    query_lens: np.ndarray, prefilling: np.ndarray, decode_query_len: int
) -> tuple[int, int]:
    """Which requests of a batch can gather: [first, last), all of them prefilling.

    The requests behind the last one that decodes. Upstream sorts decodes and
    verifications to the front, but a builder's split depends on its kernels: with an
    interleave above 1, or with verified lengths that differ, requests that verify
    drafts stand behind it. A short chunk among the decodes keeps their path.

    Args:
        query_lens: integers [requests] of this step, 0 for padding.
        prefilling: bool [requests or fewer], `is_prefilling` of the batch.
        decode_query_len: the longest query that verifies drafts, 1 without any.

    """
    real = np.flatnonzero(query_lens > 0)
    if not len(real):
        return 0, 0
    last = int(real[-1]) + 1
    # A resumed request that recomputes its own output does not count as prefilling
    # in model runner V1, but nothing else has such a query either.
    prefills = query_lens > decode_query_len
    prefills[: len(prefilling)] |= prefilling[: len(prefills)]
    decodes = np.flatnonzero(~prefills[:last] & (query_lens[:last] > 0))
    first = int(decodes[-1]) + 1 if len(decodes) else int(real[0])
    return first, last


def ckv_gather_refusal(
    config: CKVGatherConfig,
    *,
    prefill_tokens: int,
    context_tokens: int,
    rows: int = 0,
    dense_mha: bool = False,
    capturing: bool = False,
) -> str | None:
    """Why the prefill rows of a batch keep the exchange path; None: they may gather.

    The hard bounds of the feature. Every argument is a fact that all ranks share;
    decode rows do not matter, they keep the exchange path in any case.

    Args:
        config: of the engine.
        prefill_tokens: query rows of `gathered_requests`.
        context_tokens: global KV lengths of these requests, summed.
        rows: the most rows of them that a rank has, `CKVLayout.padded_total`.
        dense_mha: upstream's dense MHA path takes prefill rows.
        capturing: the metadata is for a CUDA graph capture.

    """
    if config.dcp_world_size == 1:
        return "no decode context parallelism"
    if config.dbo:
        return "dual batch overlap"
    if capturing:
        return "CUDA graph capture"
    if prefill_tokens == 0:
        return "no prefill rows"
    if dense_mha:
        return "dense MHA prefill"
    if prefill_tokens <= config.min_tokens:
        return "too few prefill tokens"
    if context_tokens > config.max_tokens:
        return "context above the maximum"
    if rows > config.rows_per_rank:
        return "context too uneven for the buffer"
    return None


def gather_costs_more(
    config: CKVGatherConfig,
    times: KernelTimes | None,
    prefill_tokens: int,
    gathered_rows: int,
    ahead_rows: int,
) -> bool:
    """Whether the exchange path is the faster one, by the model in `dcp_cost`.

    Args:
        config: of the engine.
        times: of the backend's kernels; None: bytes alone.
        prefill_tokens: rows that would gather.
        gathered_rows: rows of all ranks' shares.
        ahead_rows: those that a look-ahead takes.

    """
    link = config.link_gbps * 1e9
    heads, world_size = config.local_heads, config.dcp_world_size
    return gather_seconds(
        times,
        prefill_tokens,
        gathered_rows,
        ahead_rows,
        heads,
        world_size,
        config.record_bytes,
        link,
    ) > exchange_seconds(times, prefill_tokens, heads, world_size, link)


# ----------------------------------------------------------------------------- plan


@dataclass
class CKVGatherPlan:
    """One step's gather. Only in metadata of batches whose prefill rows gather.

    rows: the rows that gather (T of them), the last ones of the batch.
    num_exchange_tokens: rows before them, which keep the exchange path.
    num_reqs: requests that gather (R).
    local_rows: rows of this rank's share; padded_total: rows of every rank's share.
    rank_req_starts: int32 [W, R]. local_cu_seq_lens: int32 [R + 1].
    req_ids: int32 [T], request of each row; outside [0, R) for padding rows.
    causal_lens: int32 [T], tokens that each row may see, in global positions.
    block_table: int32 [R, blocks] of the paged cache.
    page_table: int32 [1, gathered pages], the gathered buffer as one request's
        pages; page_starts: int32 [1], zero.
    kernel_metadata: what the backend adds for its kernel.
    prefetch: the step's prefetch, where the gather prefetches.
    """

    rows: slice
    num_exchange_tokens: int
    num_reqs: int
    local_rows: int
    padded_total: int
    dcp_world_size: int
    dcp_rank: int
    interleave: int
    rank_req_starts: torch.Tensor
    local_cu_seq_lens: torch.Tensor
    req_ids: torch.Tensor
    causal_lens: torch.Tensor
    block_table: torch.Tensor
    page_table: torch.Tensor
    page_starts: torch.Tensor
    kernel_metadata: Any = None
    prefetch: CKVPrefetchPlan | None = None

    @property
    def gathered_rows(self) -> int:
        return self.dcp_world_size * self.padded_total

    def own_share(self, gathered: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the gathered ones, [padded_total, ...], a view."""
        return gathered[self.dcp_rank * self.padded_total :][: self.padded_total]


class CKVGatherPlanner:
    """Makes the plan of each step, in the metadata builder.

    Args:
        config: of the engine.
        device: of the plans' tensors.
        times: of the backend's kernels; None: the choice counts bytes alone.

    """

    capturing = False
    """The builder is asked for metadata of a CUDA graph capture."""
    host_blocks: HostBlockTable | None = None
    """Of the runner, see `step_writes`. Without it no step looks ahead: a draft
    model's builder, or a runner that shares none, cannot tell what a step writes."""

    def __init__(
        self,
        config: CKVGatherConfig,
        device: torch.device,
        times: KernelTimes | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.times = times
        self.page_table = torch.arange(
            config.gathered_rows // CKV_PAGE_ROWS, dtype=torch.int32, device=device
        ).view(1, -1)

    def plan(
        self,
        common: "CommonAttentionMetadata",
        metadata: Any,
        make_kernel_metadata: Callable[[], Any] = lambda: None,
    ) -> CKVGatherPlan | None:
        """The step's plan, or None: the batch keeps the exchange path.

        Reads host lengths and host block tables only; the device sees one
        asynchronous copy.

        Args:
            common: the batch, all requests of the step.
            metadata: the sparse MLA metadata built from it, with `prefill` and
                `req_id_per_token`.
            make_kernel_metadata: gives the plan's `kernel_metadata`.

        Raises:
            RuntimeError: the batch has no host sequence lengths.

        """
        config = self.config
        query_starts = common.query_start_loc_cpu.numpy()
        query_lens = np.diff(query_starts)
        prefilling = common.is_prefilling
        first, last = gathered_requests(
            query_lens,
            np.zeros(0, bool) if prefilling is None else prefilling.numpy(),
            config.decode_query_len,
        )
        if first == last:
            return None
        if common.seq_lens_cpu_upper_bound is None:
            raise RuntimeError(
                "The CKV gather plans from seq_lens_cpu_upper_bound, which this batch "
                "lacks; reading lengths from the device would stall every step."
            )
        # Exact for requests that prefill; padding has no query and stale lengths.
        all_lens = common.seq_lens_cpu_upper_bound.numpy()
        chunk_lens = query_lens[first:last]
        seq_lens = np.where(chunk_lens > 0, all_lens[first:last], 0)
        prefill_tokens = int(chunk_lens.sum())
        prefill = metadata.prefill
        capturing = self.capturing or in_ckv_capture()
        layout = ckv_layout(seq_lens, config.dcp_world_size, config.interleave)
        refusal = ckv_gather_refusal(
            config,
            prefill_tokens=prefill_tokens,
            context_tokens=int(seq_lens.sum(dtype=np.int64)),
            rows=layout.padded_total,
            dense_mha=prefill is not None and prefill.use_dense_mha,
            capturing=capturing,
        )
        if refusal is None:
            history = seq_lens - chunk_lens
            ranges = None
            if config.prefetch and self.host_blocks is not None:
                written = self._written(common, query_lens, all_lens, first, history)
                ranges = split_history(history, seq_lens, written)
            gathered_rows = config.dcp_world_size * layout.padded_total
            ahead_rows = 0
            if ranges is not None and looks_ahead(ranges[0]):
                ahead_rows = int((ranges[0][:, 2] - ranges[0][:, 1]).sum())
            if not config.always and gather_costs_more(
                config, self.times, prefill_tokens, gathered_rows, ahead_rows
            ):
                refusal = "the exchange is faster"
        if refusal is not None:
            if not capturing:
                count_prefill_batch("exchange", refusal)
            return None
        logger.info_once("DCP prefill batches use the CKV gather.")
        if ahead_rows:
            count_prefill_batch("gather, looking ahead", "")
        else:
            count_prefill_batch("gather", self._why_not_ahead(history))

        num_reqs = last - first
        local_lens = layout.rank_req_lens[config.dcp_rank]
        # One copy to the device. The starts come first: the kernel likes them aligned.
        table = async_tensor_h2d(
            np.concatenate(
                [
                    layout.rank_req_starts.ravel(),
                    [0],
                    np.cumsum(local_lens),
                    seq_lens,
                    [0],
                ]
            ).astype(np.int32),
            device=self.device,
        )
        starts, cu_seq_lens, host_lens, zero = table.split(
            [layout.rank_req_starts.size, num_reqs + 1, num_reqs, 1]
        )

        rows = slice(int(query_starts[first]), common.num_actual_tokens)
        req_ids = metadata.req_id_per_token[rows] - first
        # Rows beyond the last query are padding, mapped to request 0 of the batch.
        index = req_ids.clamp(min=0).long()
        seq_lens_dev = torch.minimum(common.seq_lens[first:last], host_lens)
        offset = seq_lens_dev - common.query_start_loc[first + 1 : last + 1]
        row = torch.arange(
            rows.start + 1, rows.stop + 1, dtype=torch.int32, device=self.device
        )
        causal_lens = torch.minimum(offset[index] + row, seq_lens_dev[index])
        prefetch = None
        if config.prefetch:
            nothing = np.empty((0, 3), dtype=np.int64)
            early, late = (nothing, nothing) if ranges is None else ranges
            prefetch = plan_ckv_prefetch(
                layout, early, late, config.dcp_rank, self.device
            )
        return CKVGatherPlan(
            rows=rows,
            num_exchange_tokens=rows.start,
            num_reqs=num_reqs,
            local_rows=int(local_lens.sum()),
            padded_total=layout.padded_total,
            dcp_world_size=config.dcp_world_size,
            dcp_rank=config.dcp_rank,
            interleave=config.interleave,
            rank_req_starts=starts.view(config.dcp_world_size, num_reqs),
            local_cu_seq_lens=cu_seq_lens,
            req_ids=req_ids,
            causal_lens=causal_lens,
            block_table=common.block_table_tensor[first:last],
            page_table=self.page_table,
            page_starts=zero,
            kernel_metadata=make_kernel_metadata(),
            prefetch=prefetch,
        )

    def _why_not_ahead(self, history: np.ndarray) -> str:
        """Why the step, which gathers, does not look ahead, for the counters."""
        if not self.config.prefetch:
            return "prefetch is off"
        if self.host_blocks is None:
            return "block tables of a draft model"
        if history.sum() < CKV_PREFETCH_MIN_HISTORY:
            return "too little history"
        return "this step writes the history"

    def _written(
        self,
        common: "CommonAttentionMetadata",
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        first: int,
        history: np.ndarray,
    ) -> np.ndarray:
        """What of the gathered requests' contexts this step writes: int64 [ranges, 3]
        of (gathered request, first position, end).

        Args:
            common: the batch.
            query_lens, seq_lens: integers [requests] of the whole batch.
            first: the first request that gathers.
            history: integers [gathered requests].

        """
        assert self.host_blocks is not None, "Without block tables no step looks ahead."
        real = np.flatnonzero(query_lens > 0)
        ends = seq_lens[real].astype(np.int64)
        starts = ends - query_lens[real]
        # Lengths of requests that verify drafts are upper bounds: drafts of the step
        # before may turn out to be rejected. What begins too early only travels late.
        starts[real < first] -= self.config.decode_query_len - 1
        table_rows = real if common.req_idx is None else common.req_idx[real]
        readers = np.flatnonzero((real >= first) & (real < first + len(history)))
        gathered = real[readers] - first
        written = rows_written_by_batch(
            self.host_blocks,
            table_rows,
            np.maximum(starts, 0),
            ends,
            readers,
            history[gathered],
            self.config.dcp_world_size,
        )
        written[:, 0] = gathered[written[:, 0]]
        return written


def make_ckv_gather_planner(
    config: CKVGatherConfig | None,
    vllm_config: "VllmConfig",
    layer_names: list[str],
    device: torch.device,
    times: KernelTimes | None = None,
) -> CKVGatherPlanner | None:
    """The planner of a metadata builder, or None where the gather is off or DCP is 1.

    Warms up the kernel that depends on the interleave, which is final by now.

    Args:
        config: as the interleave is now.
        vllm_config: of the engine.
        layer_names: the builder's layers, whose buffers were sized when they were
            built.
        device: of the plans' tensors.
        times: see `CKVGatherPlanner`.

    Raises:
        RuntimeError: plans would not fit the buffers of a layer.

    """
    if config is None:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    for impl in (layers[name].impl for name in layer_names if name in layers):
        if impl.ckv_gather.rows_per_rank < config.rows_per_rank:
            raise RuntimeError(
                f"The CKV gather plans up to {config.rows_per_rank} rows of a rank "
                f"(interleave {config.interleave}), but its buffers hold "
                f"{impl.ckv_gather.rows_per_rank} (interleave "
                f"{impl.ckv_gather.interleave} when the model was built). Set "
                f"--cp-kv-cache-interleave-size {config.interleave}."
            )
        if config.prefetch and impl.ckv_workspace.prefetch is None:
            config = replace(config, prefetch=False)
    warm_up_remap(
        config.dcp_world_size,
        config.interleave,
        vllm_config.model_config.hf_text_config.index_topk,
        device,
    )
    return CKVGatherPlanner(config, device, times)


@contextmanager
def capturing(planner: CKVGatherPlanner | None) -> Iterator[None]:
    """Plans made inside are for a CUDA graph capture, which never gathers."""
    if planner is None:
        yield
        return
    planner.capturing = True
    try:
        yield
    finally:
        planner.capturing = False
