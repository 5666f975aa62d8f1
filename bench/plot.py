#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw what the benchmarks wrote: an SVG beside each JSON.

    python bench/plot.py                            bench/out/{ckv_gather,query_split,ckv_prefetch,several_gpus}.json, as far as they are there
    python bench/plot.py results.json ...           these, each of one of the four kinds

Needs matplotlib. Exit code 1: a file that is none of these benchmarks' results; 2: no matplotlib.
"""
import argparse
import json
import pathlib
import sys

OUT = pathlib.Path(__file__).resolve().parent / "out"
LINK = 50  # GB/s, the modelled link that is drawn for the gather on one GPU
LINKS = (25, 50, 400)  # all that bench_ckv_gather models
# One colour for a variant in all plots.
COLOURS = {"stock": "#52606d", "unsplit": "#52606d", "split": "#b7791f", "gather": "#147d64", "synchronous": "#147d64", "prefetch": "#2b6cb0", "all": "#6b46c1", "compute": "#c4cbd3"}


class Unknown(Exception):
    """A file that is no benchmark's result."""


def context(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens / 1024:g}k"


def bars(axes, labels: list[str], series: dict[str, list[float | None]], lower: dict[str, list[float]] | None = None, digits: int = 1) -> None:
    """A group of bars for each label, a bar in it for each series. `lower`: the part of a bar that is drawn in full colour."""
    width = 0.8 / len(series)
    for i, (name, heights) in enumerate(series.items()):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(labels))]
        present = [(x, height) for x, height in zip(places, heights, strict=True) if height is not None]
        colour = COLOURS.get(name.split(",")[0], "#888888")
        drawn = axes.bar([x for x, _ in present], [height for _, height in present], width * 0.92, color=colour, alpha=0.45 if lower else 1, label=None if lower else name)
        axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=7)
        if lower:
            axes.bar(places, lower[name], width * 0.92, color=colour, label=name)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(-0.6, max(len(labels), 4) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)
    legend(axes)


def legend(axes) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def ckv_gather(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["results"]
    bars(
        axes, [f"DCP{r['dcp']}\n{context(r['context'])}" for r in rows],
        {"stock": [r[f"stock_total_{LINK}_ms"] for r in rows], "gather": [r[f"gather_total_{LINK}_ms"] for r in rows]},
        {"stock": [r["stock_ms"] for r in rows], "gather": [r["gather_bf16_ms"] for r in rows]},
    )  # fmt: skip
    axes.set_ylabel("ms per layer and rank")
    axes.set_title(f"CKV gather, TP{data['tp']}, {data['rows']} rows, {data['device']}: compute (dark), bytes at {LINK} GB/s (light)", fontsize=9)


def query_split(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["rows"]
    bars(
        axes, [f"TP{r['tp']}/DCP{r['dcp']}\n{context(r['context'])}" for r in rows],
        {"unsplit": [r["unsplit_ms"]["all"] for r in rows], "split": [r["worst_split_ms"]["all"] for r in rows]},
        {"unsplit": [r["unsplit_ms"]["score+topk"] for r in rows], "split": [r["worst_split_ms"]["score+topk"] for r in rows]},
    )  # fmt: skip
    axes.set_ylabel("ms of the slowest rank")
    axes.set_title(f"Query split, sparse indexer, {data['device']}: scoring + top-k (dark), the rest (light)", fontsize=9)


def ckv_prefetch(data: dict, figure) -> None:
    axes, rows = figure.subplots(), data["results"]

    def label(row):
        hidden = "" if row["hidden"] is None else f"\n{row['hidden']:.2f} hidden"
        return f"{context(row['context'])}, {row['chunk']}\n{row['link']}{hidden}"

    bars(axes, [label(r) for r in rows], {name: [r[f"{name}_ms"] for r in rows] for name in ("compute", "synchronous", "prefetch")}, digits=2)
    axes.set_ylabel("ms per layer")
    axes.set_title(f"CKV prefetch, DCP{data['settings']['world']}, {data['device']}: context, chunk, link", fontsize=9)


def several_gpus(data: dict, figure) -> None:
    drawn = [section for section in ("layer", "indexer", "step", "link") if data[section]]
    if not drawn:
        raise Unknown("nothing was measured")
    panels = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, section in zip(panels, drawn, strict=True):
        rows = data[section]
        if section == "layer":
            bars(axes, [_place(r) for r in rows], {name: [r[f"{name}_ms"] for r in rows] for name in ("stock", "synchronous", "prefetch", "compute")}, digits=2)
            axes.set_ylabel("ms per layer")
        elif section == "indexer":
            bars(axes, [_place(r) for r in rows], {name: [r[f"{name}_ms"] for r in rows] for name in ("unsplit", "split")}, digits=2)
            axes.set_ylabel("ms of the indexer")
        elif section == "step":
            places = list(dict.fromkeys(_place(r) for r in rows))
            found = {(r["variant"], _place(r)): r["step_ms"] for r in rows}
            bars(axes, places, {name: [found.get((name, place)) for place in places] for name in dict.fromkeys(r["variant"] for r in rows)})
            axes.set_ylabel("ms per engine step")
        else:
            bars(axes, [f"{_place(r)}\n{r['what']}".replace("\n\n", "\n") for r in rows], {"measured": [r["gb_per_s"] for r in rows]}, digits=0)
            for link, style in zip(LINKS, (":", "--", "-"), strict=True):
                axes.axhline(link, color="#c53030", linewidth=1, linestyle=style, label=f"modelled, {link} GB/s")
            legend(axes)
            axes.set_ylabel("GB/s received")
    figure.suptitle(f"{data['gpus']} x {data['device']}, NCCL {data['nccl']}, chunk of {data['settings']['tokens']} tokens", fontsize=10)


def _place(row: dict) -> str:
    return f"TP{row['tp']}/DCP{row['dcp']}\n{context(row['context'])}"


PLOTS = {"ckv_gather": ckv_gather, "query_split": query_split, "ckv_prefetch": ckv_prefetch, "several_gpus": several_gpus}


def draw(path: pathlib.Path, pyplot) -> pathlib.Path:
    """Draw one JSON; return the SVG.

    Raises:
        Unknown: it is none of the four kinds, or holds nothing to draw.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unknown(f"no JSON: {error}") from None
    kind = data.get("benchmark") if isinstance(data, dict) else None
    if kind not in PLOTS:
        raise Unknown(f"not the result of a benchmark that has a plot: its \"benchmark\" is {kind!r}, not one of {', '.join(PLOTS)}")
    figure = pyplot.figure(layout="constrained")
    try:
        PLOTS[kind](data, figure)
    except KeyError as error:
        raise Unknown(f"a result of {kind} of another version: it has no {error}") from None
    widest = max(len(axes.get_xticks()) for axes in figure.axes)
    figure.set_size_inches(max(7, 1.1 * widest), 3.6 * len(figure.axes))
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: what the benchmarks wrote to bench/out")
    args = parser.parse_args()
    paths = args.files or [path for kind in PLOTS if (path := OUT / f"{kind}.json").exists()]
    if not paths:
        print("nothing to plot: no benchmark on a GPU wrote to bench/out")
        return 0
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("error: the plots need matplotlib: python -m pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("svg")
    # Text stays text, and the same results give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "vllm-dcp-stack"})
    import matplotlib.pyplot as pyplot

    failed = False
    for path in paths:
        try:
            print(f"wrote {draw(path, pyplot)}")
        except (Unknown, OSError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
