# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of base v0.11.0: pretend DCP groups, configs without a platform, no plugins."""
from types import SimpleNamespace

import pytest


@pytest.fixture
def set_dcp(monkeypatch):
    """`set_dcp(world, rank)` makes block tables and attention builders of this process see that DCP group."""

    def set_group(world: int, rank: int, *modules: str) -> None:
        group = SimpleNamespace(world_size=world, rank_in_group=rank)
        for module in ("vllm.v1.worker.block_table", *modules):
            monkeypatch.setattr(f"{module}.get_dcp_group", lambda: group)

    return set_group


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """Load none of the installed vLLM plugins: some need a later vLLM."""
    monkeypatch.setenv("VLLM_PLUGINS", "")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors are small and the machine may be busy."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def unpinned(monkeypatch):
    """The MLA builder pins host memory; without an accelerator that is an error."""
    import torch

    from tests.runtime.v0_11_0 import mla

    monkeypatch.setattr(torch, "zeros", mla.zeros_without_pinning())


@pytest.fixture
def neutral_platform(monkeypatch):
    """A platform that leaves the block size alone (the CPU one accepts 16 only)."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))


@pytest.fixture
def make_config(neutral_platform):
    """`make_config(block_size, interleave, dcp)` builds a VllmConfig."""
    from vllm.config import CacheConfig, DeviceConfig, ParallelConfig, VllmConfig

    def make(block_size, interleave, dcp=2, **kwargs):
        parallel = ParallelConfig(tensor_parallel_size=dcp, decode_context_parallel_size=dcp, distributed_executor_backend="mp",
                                  cp_kv_cache_interleave_size=interleave)
        return VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=block_size), parallel_config=parallel,
                          **kwargs)

    return make


@pytest.fixture(scope="session")
def gpu_model_runner():
    """The module of GPUModelRunner."""
    from tests.runtime.v0_11_0.runner import import_runner

    return import_runner("gpu_model_runner")
