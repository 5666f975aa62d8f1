# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""What a DCP prefill layer costs by each of its paths, from host lengths.

One layer and rank, in seconds: bytes received / link + kernels; what a look-ahead hides
costs nothing. A choice that follows from this is the same on all ranks, as lengths,
config and constants are. The constants
are fitted to bench/bench_gather_choice.py on an H200; what they leave out (projections,
experts, the indexer) is the same on every path.

With T rows, C gathered rows of all ranks, W ranks of h heads each and B = link:

    exchange  (W - 1) T h (1152 + 1024 + 4 W) / B  queries, outputs and LSEs of others
              + fp8 kernel on W h heads + T * merge + launches
    gather    (W - 1) / W * C * record / B         records of the other ranks
              + C / W * pack                        this rank's, out of its pages
              + fp8 kernel, or C * upconvert + bf16 kernel, on h heads + launches

Attention kernels take a thread block for each row and 64 heads. The fp8 kernel splits
a row over idle multiprocessors, the bf16 kernel does not: it costs whole waves.
"""

import math
from dataclasses import dataclass

QUERY_BYTES = (512 + 64) * 2
OUTPUT_BYTES = 512 * 2
LSE_BYTES = 4


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of one backend's kernels.

    blocks: thread blocks that run at once. fp8_wave, bf16_wave: a wave of them, each
    64 heads of a row with all of its top-k. fp8_start: of a launch that is split.
    pack: a row of this rank's share. pack_ahead: such a row of a look-ahead, which packs
    with few thread blocks so that the layer before keeps its multiprocessors.
    upconvert: a gathered row. merge: a row of one gathered head, the copies around the
    collectives included. exchange_launches, gather_launches: what a path takes with
    next to no rows, its three collectives or its one included.
    """

    blocks: int
    fp8_wave: float
    bf16_wave: float
    fp8_start: float
    pack: float
    pack_ahead: float
    upconvert: float
    merge: float
    exchange_launches: float
    gather_launches: float


FLASHMLA_SM90 = KernelTimes(
    blocks=132,
    fp8_wave=108e-6,
    bf16_wave=66e-6,
    fp8_start=15e-6,
    pack=0.3e-9,
    pack_ahead=2.5e-9,
    upconvert=0.6e-9,
    merge=4.6e-9,
    exchange_launches=130e-6,
    gather_launches=40e-6,
)


def exchange_bytes(rows: int, local_heads: int, dcp_world_size: int) -> int:
    """Bytes that a rank receives to attend `rows` rows over sharded KV."""
    per_head = QUERY_BYTES + OUTPUT_BYTES + LSE_BYTES * dcp_world_size
    return (dcp_world_size - 1) * rows * local_heads * per_head


def gather_bytes(gathered_rows: int, record_bytes: int, dcp_world_size: int) -> int:
    """Bytes that a rank receives of a gather of `gathered_rows` rows of all ranks."""
    return gathered_rows // dcp_world_size * (dcp_world_size - 1) * record_bytes


def fp8_seconds(times: KernelTimes, rows: int, heads: int) -> float:
    """The fp8 sparse kernel, on `heads` heads."""
    waves = rows * math.ceil(heads / 64) / times.blocks
    return times.fp8_start + times.fp8_wave * (waves if waves < 1 else math.ceil(waves))


def bf16_seconds(
    times: KernelTimes, rows: int, heads: int, gathered_rows: int
) -> float:
    """The upconversion of all gathered rows and the bf16 sparse kernel."""
    waves = math.ceil(rows * math.ceil(heads / 64) / times.blocks)
    return times.upconvert * gathered_rows + times.bf16_wave * waves


def fp8_is_faster(
    times: KernelTimes, rows: int, heads: int, gathered_rows: int
) -> bool:
    """Whether the fp8 kernel on records as they are beats upconverting them."""
    bf16 = bf16_seconds(times, rows, heads, gathered_rows)
    return fp8_seconds(times, rows, heads) < bf16


def exchange_seconds(
    times: KernelTimes | None,
    rows: int,
    local_heads: int,
    dcp_world_size: int,
    link_bytes_per_s: float,
) -> float:
    """A layer's attention by the exchange path. times: None counts bytes alone."""
    link = exchange_bytes(rows, local_heads, dcp_world_size) / link_bytes_per_s
    if times is None:
        return link
    heads = local_heads * dcp_world_size
    merge = times.exchange_launches + times.merge * rows * heads
    return link + merge + fp8_seconds(times, rows, heads)


def gather_seconds(
    times: KernelTimes | None,
    rows: int,
    gathered_rows: int,
    ahead_rows: int,
    local_heads: int,
    dcp_world_size: int,
    record_bytes: int,
    link_bytes_per_s: float,
) -> float:
    """A layer's attention by the CKV gather.

    Args:
        times: as for `exchange_seconds`.
        rows: T.
        gathered_rows: rows of all ranks' shares.
        ahead_rows: those among them that travel while the layer before computes. They
            are hidden as long as its attention takes, the least that hides them.
        local_heads, dcp_world_size, record_bytes, link_bytes_per_s: see above.

    """

    def link(rows: int) -> float:
        return gather_bytes(rows, record_bytes, dcp_world_size) / link_bytes_per_s

    if times is None:
        return link(gathered_rows - ahead_rows)
    late_rows = gathered_rows - ahead_rows
    kernel = times.gather_launches + min(
        fp8_seconds(times, rows, local_heads),
        bf16_seconds(times, rows, local_heads, gathered_rows),
    )
    late = times.pack * late_rows / dcp_world_size + link(late_rows)
    ahead = times.pack_ahead * ahead_rows / dcp_world_size + link(ahead_rows)
    return late + max(ahead, kernel)
