# SPDX-License-Identifier: Apache-2.0
"""What every way to run ranks as processes shares: a port to meet at, and an end that always comes."""
import contextlib
import os
import queue
import random
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

# What gloo and NCCL tell a rank whose peer is gone: that peer's own error is the one to show.
_LOST_PEER = ("Connection closed by peer", "remote process exited or there was a network error")


def _lost_peer(text: str) -> bool:
    return any(words in text for words in _LOST_PEER)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on. Below those that the system gives to connections (from 32768 on): it may
    take a rank half a minute until it listens, while other worlds connect."""
    while True:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _say_where(stuck) -> None:
    """Let ranks that have a handler for it (faulthandler) write their stacks to stderr."""
    for process in stuck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)


def collect(processes: Sequence, results, timeout: float) -> list[Any]:
    """The values that started processes put into `results` as (rank, succeeded, value or traceback), in rank order.

    Ends every process. Raises AssertionError with the traceback of the rank that failed first (not of one that only lost its
    peer by it), with the exit codes of ranks that died, or with the ranks that still run after `timeout` seconds.
    """
    world = len(processes)
    done: dict[int, Any] = {}
    failed: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(done) + len(failed) < world and all(map(_lost_peer, failed.values())):
            try:
                rank, ok, value = results.get(timeout=0.2)
            except queue.Empty:
                waiting = sorted(set(range(world)) - done.keys() - failed.keys())
                dead = [r for r in waiting if not processes[r].is_alive() and processes[r].exitcode]
                assert not dead, f"ranks {dead} died with exit codes {[processes[r].exitcode for r in dead]}"
                if time.monotonic() >= deadline:
                    _say_where(processes[r] for r in waiting)
                assert time.monotonic() < deadline, f"ranks {waiting} of {world} still running after {timeout} s: a stuck collective?"
                continue
            (done if ok else failed)[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, text in sorted(failed.items(), key=lambda item: _lost_peer(item[1])):
        raise AssertionError(f"rank {rank} failed:\n{text}")
    return [done[r] for r in range(world)]
