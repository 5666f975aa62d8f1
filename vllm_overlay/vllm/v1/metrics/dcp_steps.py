# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Which path prefill rows took under DCP, counted in the worker, shown in /metrics.

A planner counts each batch with prefill rows that it sees, in a dictionary of the
process. The counts of a step travel with its `ModelRunnerOutput` and the scheduler's
stats to the front end, where they become one Prometheus counter. With every flag off
nothing counts, nothing travels, and /metrics has nothing new.
"""

from collections import Counter
from typing import Any

_SEPARATOR = ": "
_counts: Counter[str] = Counter()


def count_prefill_batch(path: str, reason: str) -> None:
    """Count a batch of this step.

    Args:
        path: that its prefill rows took, without a colon.
        reason: why no better one; empty for the best.

    """
    _counts[f"{path}{_SEPARATOR}{reason}"] += 1


def take_step_counts() -> dict[str, int] | None:
    """What was counted since the last call, or None: a step without prefill rows."""
    if not _counts:
        return None
    counts = dict(_counts)
    _counts.clear()
    return counts


class DCPStepsProm:
    """The counter `vllm:dcp_prefill_batches`, with the labels path and reason.

    Created when something is counted for the first time.

    Args:
        counter_cls: as of the logger that owns it.
        labelnames: of all its metrics.
        per_engine_labelvalues: engine index: values of `labelnames`.

    """

    def __init__(
        self,
        counter_cls: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._counter_cls = counter_cls
        self._labelnames = labelnames
        self._labelvalues = per_engine_labelvalues
        self._counter: Any = None

    def observe(self, counts: dict[str, int] | None, engine_idx: int) -> None:
        """Add the counts of a step."""
        if not counts:
            return
        if self._counter is None:
            self._counter = self._counter_cls(
                name="vllm:dcp_prefill_batches",
                documentation=(
                    "Batches with prefill rows under decode context parallelism, by "
                    "the path that these rows took and why not a better one. A draft "
                    "model's batches count for themselves."
                ),
                labelnames=[*self._labelnames, "path", "reason"],
            )
        for key, number in counts.items():
            path, _, reason = key.partition(_SEPARATOR)
            self._counter.labels(*self._labelvalues[engine_idx], path, reason).inc(
                number
            )
