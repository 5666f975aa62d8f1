# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks that run at the same time on one machine: most of a world's time is its start."""
import concurrent.futures
from collections.abc import Callable, Hashable, Iterator
from typing import Any


class SideBySide:
    """Each world runs once, `at_once` of them at a time, whoever asks first. A failure is an AssertionError that `run` returns."""

    def __init__(self, at_once: int = 4):
        self.pool, self.worlds = concurrent.futures.ThreadPoolExecutor(at_once), {}

    def start(self, key: Hashable, run: Callable[..., Any], *args: Any) -> None:
        if key not in self.worlds:
            self.worlds[key] = self.pool.submit(run, *args)

    def result(self, key: Hashable, run: Callable[..., Any], *args: Any) -> Any:
        self.start(key, run, *args)
        return self.worlds[key].result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def selected(request, *tests: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, parameters) of this session's tests of the asking module that have one of these names."""
    for item in request.session.items:
        if item.path == request.path and item.originalname in tests:
            yield item.originalname, item.callspec.params if hasattr(item, "callspec") else {}


def outcome(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the AssertionError that it raised: kept, for starting again for every test would take hours."""
    try:
        return run()
    except AssertionError as failure:
        return failure
