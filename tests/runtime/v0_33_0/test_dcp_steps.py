# SPDX-License-Identifier: Apache-2.0
"""The counts of prefill batches and their metric. The way between, through an engine: test_margin_engine.py."""
import prometheus_client
import pytest
from vllm.v1.metrics import dcp_steps
from vllm.v1.metrics.dcp_steps import DCPStepsProm, count_prefill_batch, take_step_counts

pytestmark = [pytest.mark.base("v0.33.0")]


@pytest.fixture(autouse=True)
def nothing_counted():
    dcp_steps._counts.clear()


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def samples(registry):
    return {tuple(sorted(s.labels.items())): s.value for m in registry.collect() for s in m.samples if s.name == "vllm:dcp_prefill_batches_total"}


def prom(registry):
    return DCPStepsProm(lambda **kwargs: prometheus_client.Counter(registry=registry, **kwargs), ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_counts_are_taken_once():
    assert take_step_counts() is None
    count_prefill_batch("gather, looking ahead", "")
    for _ in range(2):
        count_prefill_batch("exchange", "too few prefill tokens")
    assert take_step_counts() == {"gather, looking ahead: ": 1, "exchange: too few prefill tokens": 2}
    assert take_step_counts() is None


def test_nothing_counted_is_no_metric(registry):
    seen = prom(registry)
    for counts in (None, {}):
        seen.observe(counts, 0)
    assert list(registry.collect()) == []


def test_counts_add_up_by_engine_path_and_reason(registry):
    seen = prom(registry)
    for engine, number in ((0, 1), (1, 5), (0, 2)):
        seen.observe({"exchange: the exchange is faster": number, "gather, looking ahead: ": 1}, engine)

    def key(engine, path, reason):
        return tuple(sorted(dict(model_name="m", engine=engine, path=path, reason=reason).items()))

    assert samples(registry) == {
        key("0", "exchange", "the exchange is faster"): 3,
        key("1", "exchange", "the exchange is faster"): 5,
        key("0", "gather, looking ahead", ""): 2,
        key("1", "gather, looking ahead", ""): 1,
    }
