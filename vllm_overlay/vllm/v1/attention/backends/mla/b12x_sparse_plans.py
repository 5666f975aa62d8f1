# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""The sparse MLA kernels of the package `b12x`: records, plans and their warm-up.

What the package asks for (1.5.1):
- slots are flat, `page * 64 + row`; ids, counts and lengths are int32;
- a decode plan runs any batch up to the rows that it was *first run* with, and cuts a
  row into a number of splits fixed at that time: a plan per batch size, first run full;
- an extend plan runs any batch up to its rows and always returns an LSE, base 2;
- head counts are multiples of 8, and the ids of a row exactly as many as planned.
"""

import functools
import importlib
import importlib.metadata
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit
from vllm.utils.b12x import has_b12x
from vllm.utils.math_utils import cdiv
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.worker.workspace import current_workspace_manager

MIN_B12X_VERSION = "1.5.1"
PAGE_ROWS = 64
HEAD_MULTIPLE = 8
TOPK_WIDTHS = (512, 1024, 2048)
LATENT_DIM = 512
QUERY_DIM = 576
# Candidates of one decode chunk; a row is split between chunks.
_CHUNK = 64
# The package lets a decode launch have at most three waves of thread blocks of 16
# heads, unless even one split for each row has more: then it would split most.
_MAX_WAVES = 3
_HEADS_PER_BLOCK = 16
# An extend plan takes any number of rows once it has run.
_EXTEND_WARMUP_ROWS = 16


# ------------------------------------------------------------------------ package


@dataclass(frozen=True)
class RecordFormat:
    """How `b12x` is told about a cache record.

    own_writer: no operation of vLLM writes it, the package does.
    """

    record_bytes: int
    scale_format: int
    fp8_rope: bool
    latent_scale_per_token: bool
    own_writer: bool


# vLLM's own nvfp4_ds_mla record (352 bytes) is laid out for FlashMLA on SM100. Here the
# cache holds the package's: 256 B e2m1 latent, 32 B e4m3 scales, the fp32 scales of
# RoPE and latent, 8 B padding, 64 B e4m3 RoPE.
RECORD_FORMATS = {
    "fp8_ds_mla": RecordFormat(656, 1, False, False, own_writer=False),
    "nvfp4_ds_mla": RecordFormat(368, 2, True, True, own_writer=True),
}

_API = "b12x.attention.sparse_mla.api"
_PREPARATION = "b12x.preparation"
_WRITER = "b12x.attention._shared.mla.kv_cache"
# What is used of each module.
B12X_NAMES = {
    _API: ("Caps", "ModelType", "plan", "bind", "run", "is_supported"),
    _PREPARATION: ("PreparationSession", "PreparedCall"),
    _WRITER: ("concat_and_cache_nvfp4_mla_fp8_rope",),
}


def b12x_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def b12x_refusal() -> str | None:
    """Why the package cannot run here, or None."""
    if not has_b12x():
        return "the package b12x is missing: pip install 'vllm[b12x]'"
    version = importlib.metadata.version("b12x")
    if Version(version) < Version(MIN_B12X_VERSION):
        return f"b12x {version} is too old, it must be at least {MIN_B12X_VERSION}"
    for module_name, names in B12X_NAMES.items():
        try:
            module = b12x_module(module_name)
        except ImportError as e:
            return f"b12x {version} cannot be imported: {e}"
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            return f"b12x {version} has no {', '.join(missing)} in {module_name}"
    if not b12x_module(_API).is_supported():
        return f"b12x {version} finds no SM120 or SM121 GPU, or no CuTe DSL to use"
    return None


# -------------------------------------------------------------------------- plans


def max_decode_splits(rows: int, heads: int, topk: int, compute_units: int) -> int:
    """How many splits of a row a decode plan needs room for.

    Partial outputs take `rows * heads * splits` KiB: room for the most splits that a
    row can have would take gigabytes for a large batch, which gets one split anyway.

    Args:
        rows: of the plan.
        heads: padded.
        topk: ids of a row.
        compute_units: SMs of the device.

    """
    blocks = rows * cdiv(heads, _HEADS_PER_BLOCK)
    return min(cdiv(topk, _CHUNK), max(_MAX_WAVES * compute_units // blocks, 1))


@dataclass(frozen=True)
class B12xGeometry:
    """All that the plans depend on. Layers of equal geometry share the plans.

    query_heads: padded heads of the exchange path, those of all DCP ranks.
    local_heads: padded heads of the gather path.
    decode_rows: ascending batch sizes of decode plans.
    extend_rows: most rows of a batch.
    gathered_rows: capacity of the gathered buffer, 0 without the CKV gather.
    """

    device: torch.device
    cache_dtype: str
    softmax_scale: float
    topk: int
    query_heads: int
    local_heads: int
    return_lse: bool
    decode_rows: tuple[int, ...]
    extend_rows: int
    max_num_seqs: int
    gathered_rows: int = 0


@dataclass(eq=False)
class B12xPlan:
    """A declared plan. `ready`: it has run, so it compiles nothing more."""

    name: str
    plan: Any
    mode: str
    rows: int
    heads: int
    return_lse: bool
    scratch_bytes: int
    ready: bool = False


class B12xSparseMLA:
    """The plans of one geometry: declared at once, compiled by the warm-up."""

    def __init__(self, geometry: B12xGeometry) -> None:
        self.geometry = geometry
        self.record = RECORD_FORMATS[geometry.cache_dtype]
        self._session: Any = None
        self._writer_ready = not self.record.own_writer
        lse, heads = geometry.return_lse, geometry.query_heads
        self.decode = [
            self._declare(f"decode.{rows}", "decode", rows, heads, lse)
            for rows in geometry.decode_rows
        ]
        self.extend = self._declare(
            "extend", "extend", geometry.extend_rows, heads, lse
        )
        self.gathered: B12xPlan | None = None
        if geometry.gathered_rows:
            self.gathered = self._declare(
                "gathered",
                "extend",
                geometry.extend_rows,
                geometry.local_heads,
                False,
                kv_rows=geometry.gathered_rows,
            )

    @property
    def plans(self) -> list[B12xPlan]:
        extra = [] if self.gathered is None else [self.gathered]
        return [*self.decode, self.extend, *extra]

    @property
    def scratch_bytes(self) -> int:
        return max(plan.scratch_bytes for plan in self.plans)

    def _declare(
        self,
        name: str,
        mode: str,
        rows: int,
        heads: int,
        return_lse: bool,
        kv_rows: int = 0,
    ) -> B12xPlan:
        api, geometry, record = b12x_module(_API), self.geometry, self.record
        more: dict[str, Any] = {}
        if mode == "decode":
            more["max_chunks_per_row"] = max_decode_splits(
                rows, heads, geometry.topk, num_compute_units(geometry.device.index)
            )
        if kv_rows:
            more["max_kv_rows"] = kv_rows
            more["max_page_table_width"] = cdiv(kv_rows, PAGE_ROWS)
        caps = api.Caps(
            device=geometry.device,
            mode=mode,
            num_q_heads=heads,
            max_q_rows=rows,
            # Lengths come per request or per row.
            max_batch=max(rows, geometry.max_num_seqs),
            max_width=geometry.topk,
            softmax_scale=geometry.softmax_scale,
            dtype=torch.bfloat16,
            kv_dtype=torch.uint8,
            head_dim=QUERY_DIM,
            v_head_dim=LATENT_DIM,
            page_size=PAGE_ROWS,
            # The model type names the 512 + 64 wide query, also that of DeepSeek.
            model_type=int(api.ModelType.GLM_NSA),
            scale_format=record.scale_format,
            cache_record_bytes=record.record_bytes,
            fp8_rope=record.fp8_rope,
            latent_scale_per_token=record.latent_scale_per_token,
            return_lse=return_lse,
            # Extend kernels know base 2 only, whatever they are asked for.
            lse_scale="natural" if mode == "decode" else "base2",
            **more,
        )
        plan = api.plan(caps)
        (scratch,) = plan.scratch_specs()
        return B12xPlan(
            name, plan, mode, rows, heads, return_lse, math.prod(scratch.shape)
        )

    def select(self, rows: int, is_decode: bool) -> B12xPlan:
        """The plan for a batch of the exchange path."""
        if is_decode:
            for plan in self.decode:
                if rows <= plan.rows:
                    return plan
        return self.extend

    def __call__(
        self,
        plan: B12xPlan,
        scratch: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            plan: one of the plans.
            scratch: uint8 [at least plan.scratch_bytes].
            q: bfloat16 [T, plan.heads, 576], contiguous.
            kv_cache: uint8 [pages, 64, record].
            slots: int32 [T, topk], contiguous; valid ones first, then -1.
            counts: int32 [T], valid slots of each row.
            lengths: int32, KV lengths of the requests or of the rows.

        Returns:
            (bfloat16 [T, plan.heads, 512], float32 [T, plan.heads] of the natural
            logarithm if the plan returns an LSE), both in `scratch`.

        Raises:
            RuntimeError: a plan that never ran, during a CUDA graph capture.

        """
        if not plan.ready:
            if scratch.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"B12X_MLA_SPARSE: plan {plan.name} was not warmed up before the "
                    "CUDA graph capture."
                )
            self.prepare(plan, scratch)
        return self._run(plan, scratch, q, kv_cache, slots, counts, lengths)

    def _run(
        self,
        plan: B12xPlan,
        scratch: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        api = b12x_module(_API)
        binding = api.bind(
            plan.plan,
            scratch=scratch[: plan.scratch_bytes],
            q=q,
            kv_cache=kv_cache,
            selected_indices=slots,
            cache_lengths=lengths,
            selected_lengths=counts,
        )
        result = api.run(binding)
        out, lse = result if isinstance(result, tuple) else (result, None)
        if not plan.return_lse:
            return out, None
        assert lse is not None, "The decode plan was made without an LSE."
        return out, lse if plan.mode == "decode" else lse.mul_(math.log(2))

    # ------------------------------------------------------------------- warm-up

    def prepare(self, plan: B12xPlan, scratch: torch.Tensor) -> None:
        """Compile a plan and run it once. The first run fixes the rows of decode."""
        preparation, geometry = b12x_module(_PREPARATION), self.geometry
        if self._session is None:
            # Compiles in this process. Kept open: closing it releases the plans.
            self._session = preparation.PreparationSession(
                device=geometry.device, autotune=False, compile_workers=0
            )

        def prepare_call(state: Any) -> Any:
            return preparation.PreparedCall(run=lambda: None)

        name = f"vllm.b12x_mla_sparse.{plan.name}.{id(plan)}"
        self._session.prepare([plan.plan.request(name=name, prepare_call=prepare_call)])

        rows = plan.rows if plan.mode == "decode" else _EXTEND_WARMUP_ROWS
        rows = min(rows, plan.rows)
        device = geometry.device
        self._run(
            plan,
            scratch,
            torch.zeros(
                (rows, plan.heads, QUERY_DIM), dtype=torch.bfloat16, device=device
            ),
            self._empty_page(),
            torch.zeros((rows, geometry.topk), dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
        )
        plan.ready = True

    def _empty_page(self) -> torch.Tensor:
        return torch.zeros(
            (1, PAGE_ROWS, self.record.record_bytes),
            dtype=torch.uint8,
            device=self.geometry.device,
        )

    def _prepare_writer(self) -> None:
        latent = torch.zeros(
            (1, LATENT_DIM), dtype=torch.bfloat16, device=self.geometry.device
        )
        rope = latent[:, : QUERY_DIM - LATENT_DIM].contiguous()
        slot = torch.full((1,), -1, dtype=torch.int64, device=self.geometry.device)
        write_nvfp4_records(latent, rope, self._empty_page(), slot)
        self._writer_ready = True

    def warm_up(self) -> None:
        """Compile all that serving runs."""
        (scratch,) = current_workspace_manager().get_simultaneous(
            ((self.scratch_bytes,), torch.uint8)
        )
        for plan in self.plans:
            if not plan.ready:
                self.prepare(plan, scratch)
        if not self._writer_ready:
            self._prepare_writer()

    def get_cutedsl_warmup_compile_units(self) -> tuple[CuTeDSLCompileUnit, ...]:
        return (
            CuTeDSLCompileUnit(
                name="b12x_mla_sparse",
                key=("b12x_mla_sparse", self.geometry),
                compile=self.warm_up,
            ),
        )


@functools.cache
def get_b12x_sparse_mla(geometry: B12xGeometry) -> B12xSparseMLA:
    return B12xSparseMLA(geometry)


def write_nvfp4_records(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write nvfp4_ds_mla records of `RECORD_FORMATS` with the package's writer.

    Args:
        kv_c: bfloat16 [at least T, 512].
        k_pe: bfloat16 [at least T, 64], with the position applied.
        kv_cache: uint8 [blocks, block_size, 368].
        slot_mapping: int64 [T]; negative slots are skipped.

    """
    b12x_module(_WRITER).concat_and_cache_nvfp4_mla_fp8_rope(
        kv_c, k_pe, kv_cache, slot_mapping, per_token_scale=True
    )
