#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long `apply` takes from a warm cache, beside plain git doing the same: `git worktree add` and `git am` of the same patches.

    python bench/bench_apply.py [--ref v0.33.0] [--repeat 7]

Both sides are whole processes that start from a repository holding the pinned tree and end with a patched work tree in a new
directory. Runs are interleaved, so that a busy moment hits both. Also timed: `status` and `verify` of the result, then `unapply`
and `apply` in place. Prints one table and writes bench/out/bench_apply.json; exit code 1 if a target is missed.
"""
import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "out" / "bench_apply.json"
APPLY = [sys.executable, str(ROOT / "apply.py")]
TARGETS = {"apply / git": 1.5, "status": 1.0, "verify": 10.0, "apply in place": 0.5}
sys.path.insert(0, str(ROOT / "scripts"))

from patchstack.overlay import overlay_files  # noqa: E402
from patchstack.pins import find_base, load_bases  # noqa: E402
from patchstack.report import Ui, table  # noqa: E402
from patchstack.series import load_series  # noqa: E402
from patchstack.upstream import fetch  # noqa: E402


def timed(*commands: list[str], cwd: pathlib.Path, env: dict[str, str] | None = None) -> float:
    """Seconds that the commands take one after the other, processes included."""
    start = time.perf_counter()
    for command in commands:
        done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            sys.exit(f"error: `{' '.join(command)}` failed with exit code {done.returncode}:\n{done.stderr.decode()}")
    return time.perf_counter() - start


def measure(ref: str, repeat: int, room: pathlib.Path) -> dict[str, list[float]]:
    base = find_base(ref, load_bases())
    upstream = fetch(base, "auto", Ui("bench"))  # warm the cache
    plain = room / "plain.git"
    shutil.copytree(upstream.git_dir, plain)
    patches = [str(base.folder / f"{topic}.patch") for topic in load_series(base.folder).patches]
    overlay = overlay_files(base)
    laid = room / "overlay"
    for path, data in overlay.items():
        (laid / path).parent.mkdir(parents=True, exist_ok=True)
        (laid / path).write_bytes(data)
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_COMMITTER_NAME": "bench", "GIT_COMMITTER_EMAIL": "bench@localhost", "GIT_AUTHOR_NAME": "bench", "GIT_AUTHOR_EMAIL": "bench@localhost"}  # fmt: skip
    found: dict[str, list[float]] = {"git": [], "apply": [], "status": [], "verify": [], "unapply": [], "apply in place": []}
    for number in range(repeat + 1):  # the first round warms the disk and is left out
        ours, theirs = room / f"apply-{number}", room / f"git-{number}"
        for side in (("git", "apply") if number % 2 else ("apply", "git")):
            if side == "git":
                steps = [["git", "-C", str(plain), "worktree", "add", "--quiet", "--detach", str(theirs), upstream.commit]]
                if overlay:
                    steps += [["cp", "-r", f"{laid}/.", str(theirs)], ["git", "-C", str(theirs), "add", "--", *overlay], ["git", "-C", str(theirs), "commit", "--quiet", "-m", "overlay"]]
                if patches:
                    steps += [["git", "-C", str(theirs), "am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date", *patches]]
                found["git"].append(timed(*steps, cwd=room, env=env))
            else:
                found["apply"].append(timed([*APPLY, "apply", "--ref", base.tag, "--dest", str(ours)], cwd=room))
        found["status"].append(timed([*APPLY, "status", str(ours)], cwd=room))
        found["verify"].append(timed([*APPLY, "verify", str(ours)], cwd=room))
        found["unapply"].append(timed([*APPLY, "unapply", str(ours)], cwd=room))
        found["apply in place"].append(timed([*APPLY, "apply", "--ref", base.tag, "--dest", str(ours)], cwd=room))
        if _tree(ours) != _tree(theirs):
            sys.exit("error: the two sides made different trees: nothing can be compared")
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
        subprocess.run(["git", "-C", str(plain), "worktree", "prune"], check=True, capture_output=True)
    return {name: seconds[1:] for name, seconds in found.items()}


def _tree(root: pathlib.Path) -> str:
    return subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD^{tree}"], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref", default="v0.33.0", help="the pinned release (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="measured rounds (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-apply-") as room:
        seconds = measure(args.ref, max(1, args.repeat), pathlib.Path(room))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [a / g for a, g in zip(seconds["apply"], seconds["git"], strict=True)]
    values = {"apply / git": medians["apply"] / medians["git"]} | {name: medians[name] for name in TARGETS if name in medians}
    missed = [name for name, value in values.items() if value > TARGETS[name]]
    rows = [[name, f"{medians[name]:.2f} s", f"{min(s):.2f} s", f"{max(s):.2f} s", f"at most {TARGETS[name]:g} s" if name in TARGETS else ""] for name, s in seconds.items()]
    rows.append(["apply / git", f"{values['apply / git']:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"at most {TARGETS['apply / git']:g}"])
    print(table(rows, [f"{args.ref}, {len(ratios)} rounds", "median", "least", "most", "target"]))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(["git", "version"], capture_output=True, text=True, check=True).stdout.split()[2]
    OUT.write_text(json.dumps({"schema": 1, "ref": args.ref, "seconds": seconds, "medians": medians, "ratio": values["apply / git"], "targets": TARGETS, "missed": missed,
                               "python": platform.python_version(), "git": git, "cpus": os.cpu_count()}, indent=1) + "\n")  # fmt: skip
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
