# SPDX-License-Identifier: Apache-2.0
"""The configurations that operators run, a world each, with the model whose answers hang on single KV rows.

Pairs of {graphs} x {MTP drafts} x {model runner} x {flags} x {interleave}, chosen so that each pair of values comes together in some
world, and what goes beside them: dense MHA for short prompts as upstream has it, the all-to-all exchange, replicated queries, prefix
caching, asynchronous scheduling, experts, pipeline and data parallelism, the head counts of GLM-5 and DeepSeek-V3.2.

CUDA graphs with several ranks need a GPU for each (NCCL): gloo copies through the host. What upstream refuses with the flags off is
no fault of the stack: such a world is `refused`, which is checked with the flags off.
"""
import dataclasses
import itertools
import pathlib
from typing import Any

import pytest

from . import engine_ranks, margin_deepseek, ranks
from .margin_deepseek import Spec
from .margin_prompts import judge, make_prompt
from .side_by_side import SideBySide, outcome, selected

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTHS = (5, 65, 300, 2100, 5000)
AT_ONCE = 5


@dataclasses.dataclass(frozen=True)
class World:
    """graphs: upstream's cudagraph_mode, or "eager". runner: 1 or 2. more: further arguments of the engine, as items."""

    name: str
    graphs: str = "eager"
    drafts: int = 0
    runner: int = 2
    flags: str = "all"
    interleave: int = 64
    tp: int = 2
    dcp: int = 2
    ranks: int = 2
    spec: Spec = Spec()
    twins: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def engine(self) -> dict[str, Any]:
        arguments = {"max_num_batched_tokens": 2048, "tensor_parallel_size": self.tp} | dict(self.more)
        if self.graphs != "eager":
            arguments |= {"enforce_eager": False, "compilation_config": {"cudagraph_mode": self.graphs, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}
        if self.drafts:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.drafts}
        if self.twins:
            arguments["enable_prefix_caching"] = True
        return arguments


def pairs() -> list[World]:
    """Worlds of the product in which every pair of values comes together, greedily, always the same."""
    values = dict(graphs=("eager", "FULL_AND_PIECEWISE", "FULL"), drafts=(0, 1, 3), runner=(2, 1), flags=("all", "off"), interleave=(64, 1))
    product = [dict(zip(values, combination)) for combination in itertools.product(*values.values())]

    def of(world):
        return set(itertools.combinations(sorted(world.items()), 2))

    missing, worlds = set().union(*map(of, product)), []
    while missing:
        best = max(product, key=lambda world: len(of(world) & missing))
        missing -= of(best)
        worlds.append(World("{graphs}-mtp{drafts}-v{runner}-{flags}-i{interleave}".format(**best), **best))
    return worlds


MQA = {"sparse_mla_force_mqa": True, "backend": "FLASHMLA_SPARSE"}
WORLDS = [
    *pairs(),
    World("dense-mha", more=(("attention_config", {"backend": "FLASHMLA_SPARSE"}),)),
    World("dense-mha-off", flags="off", more=(("attention_config", {"backend": "FLASHMLA_SPARSE"}),)),
    World("a2a", more=(("dcp_comm_backend", "a2a"),)),
    World("a2a-q-replicate", more=(("dcp_comm_backend", "a2a"), ("dcp_q_replicate", True))),
    World("twins-mtp1", drafts=1, twins=True),
    World("graphs-twins-mtp1", graphs="FULL_AND_PIECEWISE", drafts=1, twins=True),
    World("async", more=(("async_scheduling", True),)),
    World("not-async-mtp1", drafts=1, more=(("async_scheduling", False),)),
    World("experts", spec=Spec(experts=8)),
    World("experts-ep", spec=Spec(experts=8), more=(("enable_expert_parallel", True),)),
    World("pp2", tp=1, dcp=1, interleave=1, more=(("pipeline_parallel_size", 2),)),
    World("pp2-tp2", ranks=4, more=(("pipeline_parallel_size", 2),)),
    World("dp2-tp2", ranks=4, spec=Spec(experts=8), more=(("data_parallel_size", 2), ("enable_expert_parallel", True))),
    World("tp4-dcp2", tp=4, ranks=4, drafts=1),
    World("tp4-dcp4", tp=4, dcp=4, ranks=4, interleave=1),
    World("glm-5", spec=Spec(heads=64, nope=192, v_dim=256, topk=2048)),
    World("deepseek-v3.2", spec=Spec(heads=128, topk=2048), interleave=1),
]  # fmt: skip
BY_NAME = {world.name: world for world in WORLDS}


def rounds_of(world: World):
    spec = dataclasses.replace(world.spec, mtp=min(world.drafts, 1))
    if not world.twins:
        return spec, [[make_prompt(spec, n) for n in LENGTHS]]
    shared = make_prompt(spec, 1400, 7)
    return spec, [[make_prompt(spec, 3000)], [make_prompt(spec, 1400 + n, seed, shared.tokens) for seed, n in enumerate((150, 40, 33, 300, 64))]]


def _run(folder: pathlib.Path, world: World, flags: str):
    spec, rounds = rounds_of(world)
    model = margin_deepseek.write(folder, spec)
    job = {"model": str(model), "dcp": world.dcp, "interleave": world.interleave, "rounds": [[p.tokens for p in batch] for batch in rounds], "max_tokens": 12, "engine": world.engine}
    environment = engine_ranks.FLAGS[flags] | {"VLLM_USE_V2_MODEL_RUNNER": str(world.runner - 1)}
    return outcome(lambda: ranks.run_ranks(engine_ranks.generate_margin, world.ranks, job, env=environment, timeout=500))


def _runs_here(world: World) -> bool:
    return world.graphs == "eager" or world.ranks == 1 or ranks.over_nccl(world.ranks)


@pytest.fixture(scope="module")
def worlds(request, tmp_path_factory):
    """Starts the worlds of the tests that were selected."""
    side_by_side = SideBySide(AT_ONCE)
    for _, params in selected(request, "test_world"):
        world = BY_NAME[params["name"]]
        if _runs_here(world):
            side_by_side.start(world, _run, tmp_path_factory.mktemp("model"), world, world.flags)
    yield side_by_side
    side_by_side.close()


@pytest.mark.parametrize("name", BY_NAME)
def test_world(worlds, tmp_path, name):
    world = BY_NAME[name]
    if not _runs_here(world):
        pytest.skip("CUDA graphs over several ranks need a GPU for each")
    results = worlds.result(world, _run, tmp_path, world, world.flags)
    if isinstance(results, AssertionError) and world.flags != "off":
        stock = _run(tmp_path, world, "off")
        assert isinstance(stock, AssertionError), f"upstream runs this with the flags off:\n{results}"
        pytest.skip(f"upstream refuses this with the flags off: {str(stock).strip().splitlines()[-1][:200]}")
    if isinstance(results, AssertionError):
        pytest.skip(f"upstream refuses this: {str(results).strip().splitlines()[-1][:200]}")
    _, rounds = rounds_of(world)
    replicas = dict(world.more).get("data_parallel_size", 1)
    size = world.ranks // replicas
    for replica in range(replicas):
        mine = results[replica * size : (replica + 1) * size]
        assert all(r == mine[0] for r in mine), "ranks answered differently"
        # All but the first replica have one prompt, and then run dummy batches beside the others.
        asked = [batch[:1] if replica else batch for batch in rounds]
        answers, smallest = judge(asked, mine[0], world.dcp, world.interleave)
    if world.twins:
        assert sum(cached > 0 for cached, _ in results[0][1]) == 4, "the prefix cache was not used as meant"
    print(f"{name}: {answers} answers right, smallest lead {smallest:.2f}")
