# SPDX-License-Identifier: Apache-2.0
"""Run one function on several spawned processes that share one GPU and form a real vLLM world over gloo."""
import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from tests.processes import collect, free_port

# NCCL refuses two ranks on one GPU, and the direct paths take such ranks for peers.
ONE_GPU = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "LOCAL_RANK": "0",
}


def _rank_main(fn, rank, world, args, results):
    os.environ["RANK"] = str(rank)
    try:
        results.put((rank, True, fn(rank, world, *args)))
    except BaseException:  # the parent prints it and ends the other ranks
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()


def run_spawned(fn: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 540.0) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` processes; return the results in rank order.

    Results travel by pickle. Raises AssertionError with the traceback of the rank that failed (not of those that lost their
    peer by it, if that can be told), or with the ranks still running after `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    # Spawned processes import the caller's module before they reach `_rank_main`: they must inherit the environment.
    inherited = {**ONE_GPU, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
    before = {name: os.environ.get(name) for name in inherited}
    os.environ.update(inherited)
    processes = [context.Process(target=_rank_main, args=(fn, rank, world, args, results), daemon=True) for rank in range(world)]
    try:
        for process in processes:
            process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return collect(processes, results, timeout)


@contextlib.contextmanager
def one_gpu_world(rank: int, tp: int, dcp: int):
    """Inside a rank: one TP row of `tp` ranks with its groups, all on the first GPU. Yields the VllmConfig."""
    import torch

    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.cuda.set_device(0)
    config = VllmConfig(device_config=DeviceConfig(device="cuda"))
    with set_current_vllm_config(config):
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(tp, rank, "env://", 0, backend="gloo")
        config.parallel_config.data_parallel_size = 1
        try:
            parallel_state.initialize_model_parallel(tp, 1, 1, dcp)
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
