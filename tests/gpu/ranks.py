# SPDX-License-Identifier: Apache-2.0
"""Several vLLM ranks as processes of one host: a GPU for each over NCCL where the host has them, else one GPU over gloo.

    def work(rank, world, arguments):           # of a module that can be imported
        with vllm_world(rank, world, dcp=2) as config:
            x = torch.ones(3, device=device(rank))
            ...

    results = run_ranks(work, 4, arguments)     # in rank order

Over NCCL vLLM's own communicators run, PyNCCL among them. Over gloo every rank uses the first GPU, or the CPU, and
collectives copy through the host (tests/gpu/gloo_communicator.py). VLLM_STACK_TEST_RANKS=gloo or =nccl forces one of them.
"""
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu import gloo_communicator
from tests.processes import collect, free_port

CHOICE = "VLLM_STACK_TEST_RANKS"

# One process and one engine for a rank; all-reduce by NCCL or gloo alone. The direct DCP paths are off over NCCL too: they
# meet through PyTorch's symmetric memory, which binds NVLink multicast where it can.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
}
# NVLink multicast is the host's, not the process's: off unless the environment says otherwise.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


_starting = threading.Lock()  # worlds that start side by side share this process's environment


def over_nccl(world: int) -> bool:
    """Whether `world` ranks run over NCCL, with a GPU each; else they share the first GPU, or the CPU, over gloo.

    With VLLM_STACK_TEST_RANKS=nccl and too few GPUs: skips the test, or raises RuntimeError outside of one.
    """
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "gloo", "nccl"):
        raise ValueError(f"{CHOICE}={choice!r}: it must be gloo, nccl or unset")
    if world == 1 or choice == "gloo":
        return False
    gpus = torch.cuda.device_count()
    if choice == "nccl" and gpus < world:
        if "PYTEST_CURRENT_TEST" in os.environ:
            import pytest

            pytest.skip(f"needs {world} GPUs")
        raise RuntimeError(f"{CHOICE}=nccl: {world} ranks need {world} GPUs, this machine has {gpus}")
    return gpus >= world


def require_nccl(world: int) -> None:
    """Skip the test unless `world` ranks run over NCCL."""
    if not over_nccl(world):
        import pytest

        pytest.skip(f"{CHOICE}=gloo" if os.environ.get(CHOICE) else f"needs {world} GPUs")


def require_pynccl() -> None:
    """Raise RuntimeError where vLLM's groups do without PyNCCL: with too old a NCCL it is off, without a word, and collectives
    like reduce_scatter return memory that nobody wrote."""
    from vllm.distributed.parallel_state import get_tp_group

    comm = get_tp_group().device_communicator.pynccl_comm
    if comm is None or comm.disabled:
        raise RuntimeError(f"PyNCCL is off: vLLM v0.33.0 wants NCCL 2.29.7, PyTorch has {'.'.join(map(str, torch.cuda.nccl.version()))}; name one by VLLM_NCCL_SO_PATH")


def device(rank: int) -> torch.device:
    """Where `rank` of the world that this process belongs to computes."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank if over_nccl(int(os.environ.get("WORLD_SIZE", "1"))) else 0)


def _rank_main(fn, rank, world, args, results) -> None:
    faulthandler.register(signal.SIGUSR1)  # `collect` asks a rank that is stuck where it is
    try:
        results.put((rank, True, fn(rank, world, *args)))
    except BaseException:  # the parent prints it and ends the other ranks
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 540.0) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` new processes; return the results in rank order.

    `fn` is a function of a module; arguments and results travel by pickle and hold no CUDA tensors. Raises AssertionError
    with the traceback of the rank that failed (not of those that lost their peer by it, if that can be told), or with the
    ranks that still run after `timeout` seconds.
    """
    nccl = over_nccl(world)
    print(f"ranks: {world} over {'nccl' if nccl else 'gloo'}", flush=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    multicast = {name: value for name, value in NO_MULTICAST.items() if name not in os.environ}
    inherited = ENVIRONMENT | multicast | {
        CHOICE: "nccl" if nccl else "gloo", "VLLM_DISABLE_PYNCCL": "0" if nccl else "1", "WORLD_SIZE": str(world), "RANK": "", "LOCAL_RANK": "",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    } | (env or {})  # fmt: skip
    processes = [context.Process(target=_rank_main, args=(fn, rank, world, args, results), daemon=True) for rank in range(world)]
    # Spawned processes import the caller's module, and vLLM with it, before they reach `_rank_main`: they must inherit all this.
    with _starting:
        before = {name: os.environ.get(name) for name in inherited}
        os.environ.update(inherited)
        try:
            for rank, process in enumerate(processes):
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank if nccl else 0))
                process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return collect(processes, results, timeout)


@contextlib.contextmanager
def vllm_world(rank: int, world: int, tp: int | None = None, dcp: int = 1):
    """Inside a rank: vLLM's distributed environment and groups, TP = `tp` or `world`, DCP = `dcp`. Yields the VllmConfig.

    Torn down at the end, but not after an error: over NCCL that waits for the peers, and the parent is to hear of the error.
    """
    nccl, on = over_nccl(world), device(rank)
    backend = "nccl" if nccl else "gloo"
    if not nccl:
        gloo_communicator.install()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if on.type == "cuda":
        torch.cuda.set_device(on)
    parallel_state.set_custom_all_reduce(False)
    config = VllmConfig(device_config=DeviceConfig(device=on.type))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, "env://", on.index or 0, backend=backend)
        parallel_state.initialize_model_parallel(tp or world, 1, 1, dcp, backend=backend)
        if nccl:
            require_pynccl()
        yield config
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _in_world(rank, world, fn, dcp, args):
    torch.set_num_threads(2)
    with vllm_world(rank, world, dcp=dcp):
        return fn(rank, world, *args)


def run_dcp_ranks(fn: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 540.0) -> list[Any]:
    """`run_ranks` with `fn` called inside of vLLM's groups, TP = DCP = `world`."""
    return run_ranks(_in_world, world, fn, world, args, env=env, timeout=timeout)


@functools.cache
def _kept(fn, world, timeout):
    try:
        return run_dcp_ranks(fn, world, timeout=timeout)
    except AssertionError as failure:
        return failure


def run_dcp_ranks_once(fn: Callable[..., Any], world: int, timeout: float) -> list[Any]:
    """`run_dcp_ranks` for many tests that look at one run. A failure is kept, too: starting again for every test would take hours."""
    found = _kept(fn, world, timeout)
    if isinstance(found, AssertionError):
        raise found
    return found
