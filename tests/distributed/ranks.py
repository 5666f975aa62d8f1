# SPDX-License-Identifier: Apache-2.0
"""Run one function on several forked ranks that form a real vLLM world over gloo, and fail (never hang) on a stuck collective."""
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from tests.processes import collect, free_port


def _preload() -> None:
    """Import in the parent, once, what every rank would import by itself otherwise (seconds per rank)."""
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.distributed import parallel_state  # noqa: F401

    VllmConfig(device_config=DeviceConfig(device="cpu"))


_preload()


def _rank_main(fn, rank, world, port, env, args, results):
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # `collect` asks a rank that is stuck where it is
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        results.put((rank, True, fn(rank, world, *args)))
    except BaseException:  # the parent prints it and kills the other ranks
        results.put((rank, False, traceback.format_exc()))


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 60.0) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` forked processes; return the results in rank order.

    Results travel by pickle: return plain Python values or numpy arrays. Raises AssertionError with the traceback of the
    first rank that failed, or with the list of ranks still running when `timeout` seconds have passed. Keep it below the
    test's own pytest-timeout, which would end the whole pytest run if it struck first in a forked test.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    port = free_port()
    processes = [context.Process(target=_rank_main, args=(fn, r, world, port, env or {}, args, results), daemon=True) for r in range(world)]
    for process in processes:
        process.start()
    return collect(processes, results, timeout)


@contextlib.contextmanager
def vllm_world(rank: int, world: int):
    """Inside a rank: vLLM's distributed environment over gloo, torn down at the end. Model-parallel groups are the caller's."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, "env://", rank, backend="gloo")
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def in_dcp_world(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(rank, world, *args)` in groups of TP = DCP = `world`, with torch in place of the compiled operations. For `run_ranks`."""
    from vllm.distributed import parallel_state

    from tests.gpu._ckv_ranks import use_torch_ops

    use_torch_ops()
    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, 1, world)
        return fn(rank, world, *args)
