# SPDX-License-Identifier: Apache-2.0
"""Shared pytest set-up: choose the base whose patched tree is under test.

`pytest --base v0.33.0` imports `vllm` from wherever PYTHONPATH (a patched tree) or site-packages (an installed wheel)
has it. Tests carry `@pytest.mark.base("v0.33.0")` when they hold for some bases only; the others are deselected, never
skipped. Without `--base`, only the tests of the tool itself (tests/stack) are collected.
"""
import importlib.metadata
import json
import os
import pathlib
import re

DATA = pathlib.Path(__file__).parent / "data"

# Before any test module imports vllm: run its Triton kernels in the interpreter unless a GPU run asks otherwise.
if os.environ.get("VLLM_STACK_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


def _hide_cpu_build():
    """Drop a "+cpu" from the version that vLLM reads of itself.

    A vLLM that calls itself a CPU build switches Triton off unless Triton has a CPU backend, which the interpreter does
    not need. The platform stays "cpu" through VLLM_TARGET_DEVICE.
    """
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name).removesuffix("+cpu") if name == "vllm" else version(name)


def _mend_pytest_forked():
    """Let forked tests report: pytest 9.2 keeps a node id object in a report, which pytest-forked 1.7.5 cannot send."""
    try:
        import pytest_forked
    except ModuleNotFoundError:  # only tests/distributed needs it
        return
    serialize = pytest_forked.serialize_report

    def serialize_report(report):
        fields = serialize(report)
        if "_id" in fields:
            fields["nodeid"] = str(fields.pop("_id"))
        return fields

    pytest_forked.serialize_report = serialize_report


def pytest_addoption(parser):
    parser.addoption("--base", default=None, help="base whose patched vLLM is on the path, for example v0.33.0")


def pytest_configure(config):
    _mend_pytest_forked()
    # v0.11.0 knows the cpu platform by that suffix only, and its Triton does not look at it.
    if config.getoption("--base") != "v0.11.0" and os.environ.get("VLLM_STACK_TEST_DEVICE", "cpu") == "cpu":
        _hide_cpu_build()
    config.addinivalue_line("markers", "base(name, ...): the test holds for these bases only")
    config.addinivalue_line("markers", "cases(kind): feed `case` from tests/data/<kind>.json")
    config.addinivalue_line("markers", "gpu: the test needs a CUDA device")
    config.addinivalue_line("markers", "realpin: the test fetches a pinned vLLM release")


def pytest_ignore_collect(collection_path, config):
    """Without --base there is no vllm to import: leave the folders that need one out."""
    folder = collection_path.name
    if config.getoption("--base") is None and collection_path.is_dir() and folder in {"runtime", "distributed", "kernels", "gpu"}:
        return True
    if config.getoption("--base") is not None and collection_path.is_dir() and folder == "stack":
        return True
    # A module for other bases imports what this vLLM does not have: do not even import it.
    if config.getoption("--base") is not None and collection_path.suffix == ".py":
        marked = re.search(r"^pytestmark = .*?mark\.base\(([^)]*)\)", collection_path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if marked and f'"{config.getoption("--base")}"' not in marked[1]:
            return True
    return None


def pytest_collection_modifyitems(config, items):
    base = config.getoption("--base")
    kept, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("base")
        (kept if marker is None or base in marker.args else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # Forked tests first: they hang where an earlier test left threads behind.
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("forked") is None)


def load_cases(kind: str) -> list[dict]:
    """The cases of tests/data/<kind>.json, each with its `name` and public `source`."""
    return json.loads((DATA / f"{kind}.json").read_text(encoding="utf-8"))["cases"]


def pytest_generate_tests(metafunc):
    """`@pytest.mark.cases("slot_mapping")` feeds the argument `case` from tests/data/slot_mapping.json."""
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is not None:
        cases = load_cases(marker.args[0])
        metafunc.parametrize("case", cases, ids=[c["name"] for c in cases])
