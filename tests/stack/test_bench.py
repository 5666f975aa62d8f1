# SPDX-License-Identifier: Apache-2.0
"""bench/plot.py on a small result of each benchmark, and the parts of bench_several_gpus that need no GPU."""
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

from bench import bench_several_gpus as several
from bench.common import spread_ids, turns

PLOT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "plot.py"
DEVICE = "NVIDIA TEST"


def plot(*files, env=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(PLOT), *map(str, files)], capture_output=True, text=True, env=os.environ | (env or {}))


def several_gpus(path: pathlib.Path) -> dict:
    """Written as bench_several_gpus does, from times of two ranks."""
    results = several.Results(path)
    results.create(device=None, gpus=2, nccl="2.28.9", torch="2.13.0", settings={"tokens": 8192})
    results.set(device=DEVICE)
    world = {"tp": 2, "dcp": 2}
    link = [[[1.0], [2.0], [4.0]], [[1.5], [1.0], [3.0]]]
    results.add("link", world | {"what": "CKV gather", "context": 65536} | several.link_row(link, 40_000_000), world | {"what": "LSE merge", "context": None} | several.link_row(link, 10**8))
    rank = {"stock": [[6, 12, 18]] * 3, "synchronous": [[3, 6, 9]] * 3, "compute": [[2, 4, 6]] * 3, "prefetch": [[3, 5, 7]] * 3}
    late = {name: [[first + 1, last_but_one + 1, last] for first, last_but_one, last in times] for name, times in rank.items()}
    for context, looks_ahead in ((8192, False), (65536, True)):
        results.add("layer", world | {"context": context} | several.layer_row([rank, late], 3, looks_ahead))
    results.add("beside", world | {"context": 65536} | several.beside_row([{"alone": [[10.0]], "kernels": [[12.0]], "copies": [[10.0]]}, {"alone": [[11.0]], "kernels": [[11.0]], "copies": [[10.0]]}], 10**7))
    results.add("indexer", {"tp": 8, "dcp": 2, "context": 65536} | several.indexer_row([{"unsplit": [[4.0]], "split": [[1.0]]}] * 8, 4))
    for variant, seconds in (("stock", 2.0), ("gather", 1.0)):
        results.add("step", world | {"variant": variant, "of_stock": seconds / 2} | several.step_row([[seconds] * 5, [seconds / 2] * 5], 65536, 8192))
    return results.read()


GATHER = {"benchmark": "ckv_gather", "device": DEVICE, "rows": 8192, "tp": 8, "results": [
    {"dcp": 2, "context": 65536, "stock_ms": 8.3, "gather_bf16_ms": 4.5, "stock_total_50_ms": 14.0, "gather_total_50_ms": 5.0}]}  # fmt: skip
SPLIT = {"benchmark": "query_split", "device": DEVICE, "rows": [
    {"tp": 8, "dcp": 4, "context": 65536, "unsplit_ms": {"all": 3.3, "score+topk": 2.5}, "worst_split_ms": {"all": 1.9, "score+topk": 1.3}}]}  # fmt: skip
PREFETCH = {"benchmark": "ckv_prefetch", "device": DEVICE, "settings": {"world": 8}, "results": [
    {"context": 65536, "chunk": 2048, "link": "sm", "compute_ms": 1.1, "synchronous_ms": 1.8, "prefetch_ms": 1.2, "hidden": 0.86},
    {"context": 8192, "chunk": 8192, "link": "none", "compute_ms": 1.1, "synchronous_ms": 1.1, "prefetch_ms": 1.1, "hidden": None}]}  # fmt: skip
LABELS = {
    "ckv_gather": ["stock", "gather", "DCP2", "64k", "14.0"],
    "query_split": ["unsplit", "split", "TP8/DCP4", "1.9"],
    "ckv_prefetch": ["synchronous", "prefetch", "64k, 2048", "0.86 hidden"],
    "several_gpus": ["2 x", "NCCL 2.28.9", "TP2/DCP2", "TP8/DCP2", "stock", "modelled, 50 GB/s", "LSE merge", "ms per engine step"],
}


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_turns(names):
    """Every order is a permutation, and within the rounds of a benchmark each name follows each other one and stands everywhere."""
    rounds = [turns(names, number) for number in range(20)]
    assert all(sorted(order) == list(names) for order in rounds)
    assert rounds == [turns(iter(names), number) for number in range(20)]
    assert {pair for order in rounds for pair in itertools.pairwise(order)} == set(itertools.permutations(names, 2))
    assert {place for order in rounds for place in enumerate(order)} == set(itertools.product(range(len(names)), names))


@pytest.mark.parametrize("kind", LABELS)
def test_a_plot_of_each_kind(kind, tmp_path):
    path = tmp_path / f"{kind}.json"
    if kind == "several_gpus":
        several_gpus(path)
    else:
        path.write_text(json.dumps({"ckv_gather": GATHER, "query_split": SPLIT, "ckv_prefetch": PREFETCH}[kind]))
    done = plot(path)
    assert (done.returncode, done.stdout) == (0, f"wrote {path.with_suffix('.svg')}\n"), done.stderr
    drawn = path.with_suffix(".svg").read_text()
    assert drawn.lstrip().startswith("<?xml")
    for label in [DEVICE, *LABELS[kind]]:
        assert label in drawn, label
    first = path.with_suffix(".svg").read_bytes()
    assert plot(path).returncode == 0 and path.with_suffix(".svg").read_bytes() == first


@pytest.mark.parametrize("text, why", [
    ('{"benchmark": "apply"}', "'apply'"), ("{}", "None"), ("[]", "None"), ("no", "no JSON"), ('{"benchmark": "ckv_gather", "results": [{}]}', "another version"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_named(text, why, tmp_path):
    bad, good = tmp_path / "x.json", tmp_path / "good.json"
    bad.write_text(text)
    good.write_text(json.dumps(SPLIT))
    done = plot(bad, good)
    assert done.returncode == 1 and f"error: {bad}: " in done.stderr and why in done.stderr
    assert good.with_suffix(".svg").exists() and not bad.with_suffix(".svg").exists()


def test_no_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n")
    (tmp_path / "x.json").write_text(json.dumps(SPLIT))
    done = plot(tmp_path / "x.json", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "python -m pip install matplotlib" in done.stderr


def test_times_of_several_ranks(tmp_path, capsys):
    data = several_gpus(tmp_path / "x.json")
    assert [row["ms"] for row in data["link"]] == [2.0, 2.0]  # the median of 1.5, 2 and 4, each the slower rank's
    assert data["link"][0]["gb_per_s"] == pytest.approx(20)
    short, long = data["layer"]
    assert (short["stock_ms"], short["synchronous_ms"], short["compute_ms"], short["prefetch_ms"]) == (6, 3, 2, pytest.approx(7 / 3))
    assert (long["stock_inner_ms"], long["prefetch_inner_ms"]) == (6, 2)
    assert short["hidden"] is None and long["hidden"] == pytest.approx(2 / 3) and long["hidden_inner"] == 1
    assert [data["beside"][0][f"{name}_ms"] for name in ("alone", "kernels", "copies")] == [1.1, 1.2, 1.0]
    assert data["indexer"][0]["saved"] == 1  # 4 ms to 1 ms over 4 ranks
    assert (data["step"][0]["seconds"], data["step"][0]["steps"], data["step"][0]["step_ms"]) == (2.0, 8, 250)
    for section in several.SECTIONS:
        several.print_table(section, data[section])
    printed = capsys.readouterr().out
    for cell in ("CKV gather", "ms at 400 GB/s", "TP2/DCP2", "64k", "0.667", "TP8/DCP2", "250.0", "of stock"):
        assert cell in printed, cell


def test_what_is_hidden_is_compared_within_a_repeat():
    """Over repeats clocks drift: medians of each variant's own times would say 0.9."""
    compute, gather, visible = (10, 20, 12), (4, 4, 10), (1, 1, 1)
    inner = {"compute": compute, "synchronous": map(sum, zip(compute, gather)), "prefetch": map(sum, zip(compute, visible))}
    row = several.layer_row([{name: [[0, t, t] for t in times] for name, times in inner.items()}], 3, True)
    assert row["hidden"] == row["hidden_inner"] == 0.75


def test_worlds_and_arguments(capsys):
    assert several.choose_worlds(None, 2) == [(2, 2)] and several.choose_worlds(None, 8) == [(2, 2), (4, 4), (8, 8), (8, 2), (8, 4)]
    assert several.choose_worlds(several.parse(["--worlds", "4/2"]).worlds, 4) == [(4, 2)]
    for arguments, gpus, why in (([], 0, "needs at least 2 GPUs, found 0"), ([], 1, "needs at least 2 GPUs, found 1"), (["--worlds", "8/2"], 4, "TP8 needs 8 GPUs, found 4")):
        with pytest.raises(SystemExit) as ended:
            several.choose_worlds(several.parse(arguments).worlds, gpus)
        assert ended.value.code == 2 and why in capsys.readouterr().err
    for arguments in (["--worlds", "8"], ["--worlds", "3/2"], ["--worlds", "2/1"], ["--layers", "2"], ["--contexts", "200000"], ["--tokens", "64"], ["--repeats", "0"]):
        with pytest.raises(SystemExit) as ended:
            several.parse(arguments)
        assert ended.value.code == 2


def test_a_failed_part_is_recorded(tmp_path, monkeypatch, capsys):
    def failing(*args, **kwargs):
        raise AssertionError("rank 1 failed:\nTraceback\nRuntimeError: no link")

    monkeypatch.setitem(sys.modules, "tests.gpu.ranks", types.SimpleNamespace(run_ranks=failing))
    results = several.Results(tmp_path / "x.json")
    results.create(device=DEVICE)
    assert several.attempt(results, "TP2/DCP2", types.SimpleNamespace(timeout=1), None, 2, env={}) is None
    assert results.read()["failed"] == [{"what": "TP2/DCP2", "why": "RuntimeError: no link"}]
    assert "RuntimeError: no link" in capsys.readouterr().err


@pytest.mark.parametrize("rows, context, topk", [(40, 40, 16), (7, 100, 16), (5, 16, 16), (3, 1000, 64)])
def test_ids_are_distinct_and_causal(rows, context, topk):
    ids = spread_ids(rows, context, topk, torch.Generator().manual_seed(0))
    assert ids.dtype == torch.int32 and ids.shape == (rows, topk)
    for row, causal in zip(ids.tolist(), range(context - rows + 1, context + 1)):
        kept = [i for i in row if i >= 0]
        assert len(set(kept)) == len(kept) == min(causal, topk) and max(kept) < causal
        assert row[: len(kept)] == kept and (causal <= topk or kept != sorted(kept))
