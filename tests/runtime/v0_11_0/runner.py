# SPDX-License-Identifier: Apache-2.0
"""Import v0.11.0's model runners without numba and diskcache, which they import for n-gram drafts and structured output."""
import importlib
import importlib.util
import sys
from types import ModuleType
from unittest import mock


def import_runner(name: str) -> ModuleType:
    """`vllm.v1.worker.<name>`; packages that are missing are stubbed while it is imported, and missing again afterwards."""
    missing = [package for package in ("numba", "diskcache") if package not in sys.modules and importlib.util.find_spec(package) is None]
    sys.modules.update({package: mock.MagicMock(name=package) for package in missing})
    try:
        return importlib.import_module(f"vllm.v1.worker.{name}")
    finally:
        for package in missing:
            del sys.modules[package]
