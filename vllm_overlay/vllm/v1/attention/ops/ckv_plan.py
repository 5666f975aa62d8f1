# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""What a CKV gather fixes and decides on the host: config, layout, predicate, plan.

All of it follows from the config, flags and host lengths that all ranks share, so it
is the same on every rank; only the part that a rank takes for itself differs.
`ckv_gather` holds the workspace and the collectives.

With W = DCP size, I = interleave and t = position of a token in its request:

    owner(t) = (t // I) % W
    local(t) = t // (W * I) * I + t % I
    slot(t)  = owner(t) * padded_total + rank_req_starts[owner(t)][request] + local(t)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import vllm.envs as envs
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.ops.ckv_prefetch import NUM_BUFFERS
from vllm.v1.attention.ops.ckv_prefetch_torch import (
    CKVPrefetchPlan,
    ckv_prefetch_enabled,
    plan_ckv_prefetch,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

logger = init_logger(__name__)

# Bytes of one token's cache record. Only opaque byte records can travel raw.
CKV_RECORD_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# Sparse kernels read the gathered buffer as pages of this many rows.
CKV_PAGE_ROWS = 64


# --------------------------------------------------------------------------- config


@dataclass(frozen=True)
class CKVGatherFlags:
    enabled: bool
    min_tokens: int
    max_tokens: int


def ckv_gather_flags(b12x: bool = False) -> CKVGatherFlags:
    """The flags of the CKV gather.

    Args:
        b12x: for the b12x backend, whose own `VLLM_B12X_MLA_CKV_GATHER*` names win
            where they are set.

    Raises:
        ValueError: a negative minimum or a maximum below 1.

    """

    def flag(name: str) -> Any:
        own = getattr(envs, f"VLLM_B12X_MLA_{name}") if b12x else None
        return getattr(envs, f"VLLM_DCP_{name}") if own is None else own

    flags = CKVGatherFlags(
        enabled=flag("CKV_GATHER"),
        min_tokens=flag("CKV_GATHER_MIN_TOKENS"),
        max_tokens=flag("CKV_GATHER_MAX_TOKENS"),
    )
    if flags.min_tokens < 0 or flags.max_tokens < 1:
        raise ValueError(
            "The CKV gather needs MIN_TOKENS >= 0 and MAX_TOKENS >= 1, but got "
            f"{flags.min_tokens} and {flags.max_tokens}."
        )
    return flags


@dataclass(frozen=True)
class CKVGatherConfig:
    """What stays fixed while the engine runs, the same on all ranks but `dcp_rank`."""

    dcp_world_size: int
    dcp_rank: int
    interleave: int
    min_tokens: int
    max_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    record_bytes: int
    decode_query_len: int
    """Longest query that speculative decoding verifies, 1 without it."""
    dbo: bool = False
    num_layers: int = 1
    prefetch: bool = False

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: "VllmConfig",
        cache_dtype: str,
        record_bytes: int | None = None,
        b12x: bool = False,
    ) -> "CKVGatherConfig | None":
        """The config, or None where the gather is off or DCP is 1.

        Args:
            vllm_config: of the engine, or of the draft model.
            cache_dtype: KV cache format of the layer.
            record_bytes: bytes of a cache record, where the backend's differ from
                `CKV_RECORD_BYTES`.
            b12x: see `ckv_gather_flags`.

        Raises:
            NotImplementedError: a cache format that has no raw records, or PCP.
            ValueError: see `ckv_gather_flags`.

        """
        flags = ckv_gather_flags(b12x)
        parallel_config = vllm_config.parallel_config
        world_size = parallel_config.decode_context_parallel_size
        gather = flags.enabled and world_size > 1
        prefetch = ckv_prefetch_enabled(vllm_config, gather)
        if not gather:
            return None
        if cache_dtype not in CKV_RECORD_BYTES:
            raise NotImplementedError(
                "The DCP CKV gather sends raw cache records and supports the KV cache "
                f"formats {sorted(CKV_RECORD_BYTES)}, but got {cache_dtype!r}. "
                "Set VLLM_DCP_CKV_GATHER=0 for this format."
            )
        if parallel_config.prefill_context_parallel_size > 1:
            raise NotImplementedError(
                "The DCP CKV gather does not support prefill context parallelism, "
                "which has a KV gather of its own. Set VLLM_DCP_CKV_GATHER=0."
            )
        scheduler_config = vllm_config.scheduler_config
        model_config = vllm_config.model_config
        return cls(
            dcp_world_size=world_size,
            dcp_rank=get_dcp_group().rank_in_group,
            interleave=parallel_config.cp_kv_cache_interleave_size,
            min_tokens=flags.min_tokens,
            # A batch cannot hold more context than this: do not reserve for it.
            max_tokens=min(
                flags.max_tokens,
                model_config.max_model_len * scheduler_config.max_num_seqs,
            ),
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            record_bytes=record_bytes or CKV_RECORD_BYTES[cache_dtype],
            decode_query_len=max_decode_query_len(vllm_config),
            dbo=parallel_config.use_ubatching,
            num_layers=model_config.get_num_layers(parallel_config),
            prefetch=prefetch,
        )

    @property
    def rows_per_rank(self) -> int:
        """Capacity of one rank's share of the gathered buffer.

        A rank holds at most `interleave` tokens of a request above its even share.
        """
        share = cdiv(self.max_tokens, self.dcp_world_size)
        return round_up(share + self.max_num_seqs * self.interleave, CKV_PAGE_ROWS)

    @property
    def gathered_rows(self) -> int:
        return self.dcp_world_size * self.rows_per_rank

    @property
    def num_buffers(self) -> int:
        return NUM_BUFFERS if self.prefetch else 1

    @property
    def workspace_bytes(self) -> int:
        """The gathered buffers: a rank's own rows are gathered in place."""
        return self.num_buffers * self.gathered_rows * self.record_bytes


# --------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class CKVLayout:
    """Where the records of a batch lie in the gathered buffer.

    rank_req_lens, rank_req_starts: int32 [W, requests]. padded_total: rows of every
    rank's share, so rank r's rows start at `r * padded_total`.
    """

    rank_req_lens: np.ndarray
    rank_req_starts: np.ndarray
    padded_total: int


def ckv_layout(
    seq_lens: np.ndarray,
    dcp_world_size: int,
    interleave: int,
    align: int = CKV_PAGE_ROWS,
) -> CKVLayout:
    """Lay out requests of global lengths `seq_lens`, packed per rank. Host only.

    Args:
        seq_lens: integers [requests], each >= 0.
        dcp_world_size: W.
        interleave: I.
        align: `padded_total` is the largest rank total rounded up to it.

    Raises:
        ValueError: a size below 1, a negative length, or not one dimension.

    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    if dcp_world_size < 1 or interleave < 1 or align < 1:
        raise ValueError(
            "dcp_world_size, interleave and align must be at least 1, but got "
            f"{dcp_world_size}, {interleave} and {align}."
        )
    if lens.ndim != 1 or (lens < 0).any():
        raise ValueError(f"seq_lens must be lengths of one dimension, but got {lens}.")
    stripe = dcp_world_size * interleave
    offsets = np.arange(dcp_world_size, dtype=np.int64)[:, None] * interleave
    rank_lens = lens // stripe * interleave + np.clip(
        lens % stripe - offsets, 0, interleave
    )
    starts = np.cumsum(rank_lens, axis=1) - rank_lens
    largest = int(rank_lens.sum(axis=1).max())
    return CKVLayout(
        rank_req_lens=rank_lens.astype(np.int32),
        rank_req_starts=starts.astype(np.int32),
        padded_total=round_up(largest, align),
    )


# ---------------------------------------------------------------------- eligibility


def ckv_gather_refusal(
    config: CKVGatherConfig,
    *,
    prefill_tokens: int,
    context_tokens: int,
    dense_mha: bool = False,
    spec_verify: bool = False,
    capturing: bool = False,
) -> str | None:
    """Why the prefill rows of a batch keep the exchange path; None: they gather.

    The one predicate of the feature. Every argument is a fact that all ranks share;
    decode rows do not matter, they keep the exchange path in any case.

    Args:
        config: of the engine.
        prefill_tokens: query rows of the prefill requests.
        context_tokens: global KV lengths of the prefill requests, summed.
        dense_mha: upstream's dense MHA path takes these rows.
        spec_verify: all "prefill" requests verify draft tokens.
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
    if spec_verify:
        return "speculative verification"
    if prefill_tokens <= config.min_tokens:
        return "too few prefill tokens"
    if context_tokens > config.max_tokens:
        return "context above the maximum"
    return None


# ----------------------------------------------------------------------------- plan


@dataclass
class CKVGatherPlan:
    """One step's gather. Only in metadata of batches whose prefill rows gather.

    rows: the batch's prefill rows (T of them).
    num_decode_tokens: rows before them.
    num_reqs: prefill requests (R).
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
    num_decode_tokens: int
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
    """Makes the plan of each step, in the metadata builder."""

    capturing = False
    """The builder is asked for metadata of a CUDA graph capture."""

    def __init__(self, config: CKVGatherConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
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

        Reads host lengths only; the device sees one asynchronous copy.

        Args:
            common: the batch.
            metadata: the sparse MLA metadata built from it, with `num_decodes`,
                `num_prefills`, `num_decode_tokens`, `prefill`, `req_id_per_token`.
            make_kernel_metadata: gives the plan's `kernel_metadata`.

        Raises:
            RuntimeError: the batch has no host sequence lengths.

        """
        config = self.config
        num_decodes, num_reqs = metadata.num_decodes, metadata.num_prefills
        if num_reqs == 0:
            return None
        if common.seq_lens_cpu_upper_bound is None:
            raise RuntimeError(
                "The CKV gather plans from seq_lens_cpu_upper_bound, which this batch "
                "lacks; reading lengths from the device would stall every step."
            )
        first, last = num_decodes, num_decodes + num_reqs
        bounds = common.query_start_loc_cpu[first : last + 1].numpy()
        query_lens = np.diff(bounds)
        seq_lens = common.seq_lens_cpu_upper_bound[first:last].numpy()
        # Padding requests have no query; their lengths are stale.
        seq_lens = np.where(query_lens > 0, seq_lens, 0)
        prefilling = common.is_prefilling
        prefill = metadata.prefill
        refusal = ckv_gather_refusal(
            config,
            prefill_tokens=int(query_lens.sum()),
            context_tokens=int(seq_lens.sum(dtype=np.int64)),
            dense_mha=prefill is not None and prefill.use_dense_mha,
            spec_verify=int(query_lens.max()) <= config.decode_query_len
            and not (prefilling is not None and bool(prefilling[first:last].any())),
            capturing=self.capturing,
        )
        if refusal is not None:
            logger.debug_once(
                "A DCP prefill batch keeps the exchange path: %s", refusal
            )
            return None
        logger.info_once("DCP prefill batches use the CKV gather.")

        layout = ckv_layout(seq_lens, config.dcp_world_size, config.interleave)
        assert layout.padded_total <= config.rows_per_rank
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

        rows = slice(metadata.num_decode_tokens, common.num_actual_tokens)
        req_ids = metadata.req_id_per_token[rows] - num_decodes
        # Rows beyond the last query are padding, mapped to request 0 of the batch.
        index = req_ids.clamp(min=0).long()
        # Device lengths: the host's are upper bounds in asynchronous scheduling.
        seq_lens_dev = torch.minimum(common.seq_lens[first:last], host_lens)
        offset = seq_lens_dev - common.query_start_loc[first + 1 : last + 1]
        row = torch.arange(
            rows.start + 1, rows.stop + 1, dtype=torch.int32, device=self.device
        )
        causal_lens = torch.minimum(offset[index] + row, seq_lens_dev[index])
        return CKVGatherPlan(
            rows=rows,
            num_decode_tokens=metadata.num_decode_tokens,
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
            prefetch=self._plan_prefetch(
                layout,
                seq_lens - query_lens,
                # Only requests that verify drafts have inexact host lengths.
                exact=config.decode_query_len == 1
                or prefilling is not None
                and bool((prefilling[first:last].numpy() | (query_lens == 0)).all()),
            ),
        )

    def _plan_prefetch(
        self, layout: CKVLayout, history: np.ndarray, exact: bool
    ) -> CKVPrefetchPlan | None:
        """history: integers [R], context of each request before this step."""
        config = self.config
        if not config.prefetch:
            return None
        shares = ckv_layout(history, config.dcp_world_size, config.interleave)
        return plan_ckv_prefetch(
            layout,
            shares.rank_req_lens,
            history_tokens=int(history.sum(dtype=np.int64)),
            exact=exact,
            dcp_rank=config.dcp_rank,
            device=self.device,
        )


def make_ckv_gather_planner(
    vllm_config: "VllmConfig", cache_dtype: str, device: torch.device
) -> CKVGatherPlanner | None:
    """The builder's planner, or None where the gather is off or DCP is 1.

    Raises:
        NotImplementedError, ValueError: see `CKVGatherConfig.from_vllm_config`.

    """
    config = CKVGatherConfig.from_vllm_config(vllm_config, cache_dtype)
    return None if config is None else CKVGatherPlanner(config, device)


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
