# SPDX-License-Identifier: Apache-2.0
"""Kill a command at every step, or at a random moment. `VLLM_STACK_KILLS=all`: every step in every way, and more at random; else some of each kind."""
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

KILLER = pathlib.Path(__file__).with_name("killer.py")
ALL = os.environ.get("VLLM_STACK_KILLS") == "all"
MOVES = ("rename", "replace", "link", "unlink", "program git update-ref", "program git symbolic-ref", "program git update-index", "program git reset", "program git config", "the end")


def killed(project, number: int, how: str, *args: object, meddle: str | None = None) -> subprocess.CompletedProcess:
    """The command, killed at a step; a process group of its own. `meddle`: run that shell command at the step instead."""
    command = [sys.executable, str(KILLER), str(number), how, str(project.root), *map(str, args)]
    return subprocess.run(command, cwd=project.room, env=project.environment(MEDDLE=meddle), capture_output=True, timeout=600, text=True, start_new_session=True)


def steps(project, *args: object) -> list[str]:
    return [line.removeprefix("STEP ") for line in killed(project, 0, "before", *args).stderr.splitlines() if line.startswith("STEP ")]


def chosen(names: list[str]) -> Iterator[tuple[int, str]]:
    """(step, how) of the kills to make."""
    for number, name in enumerate(names, 1):
        ways = ("before", "during", "orphan") if name.startswith("program ") else ("before", "after") if name != "the end" else ("before",)
        if ALL:
            yield from ((number, way) for way in ways)
        elif name.startswith(MOVES) or number % 7 == 0:  # between each two renames
            yield number, ways[number % len(ways)]


def every_kill(project, *args: object, reset: Callable[[], None], least: int = 0) -> Iterator[str]:
    """Yield after each kill; `reset()` makes the state before the command. With ALL, more at random moments until there were `least`."""
    reset()
    names = steps(project, *args)
    assert len(names) > 10 and names[-1] == "the end", names
    total = 0
    for number, how in chosen(names):
        reset()
        done = killed(project, number, how, *args)
        if how in ("during", "orphan") and done.returncode == 0:
            continue  # over before the kill
        assert done.returncode == -signal.SIGKILL, (number, how, names[number - 1], done.returncode, done.stderr)
        total += 1
        yield f"{how} step {number}: {names[number - 1]}"
    chance = random.Random(20)
    reset()
    started = time.monotonic()
    subprocess.run(command_of(project, *args), cwd=project.room, env=project.environment(), capture_output=True, check=True)
    long = time.monotonic() - started
    left = max(0, least - total) if ALL else 2
    while left:
        moment = chance.uniform(0, long)
        reset()
        if killed_after(project, moment, *args):
            left -= 1
            total += 1
            yield f"after {moment:.3f} s"
        else:
            long = max(0.1, long * 0.95)
    print(f"{total} kills of {args[0]}, {len(names)} steps")


def command_of(project, *args: object) -> list[str]:
    return [sys.executable, str(project.root / "apply.py"), *map(str, args)]


def killed_after(project, seconds: float, *args: object) -> bool:
    """Kill the group of a running command from outside; False if it was over before."""
    run = subprocess.Popen(command_of(project, *args), cwd=project.room, env=project.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(seconds)
    over = run.poll() is not None
    if not over:
        os.killpg(run.pid, signal.SIGKILL)
    return run.wait() == -signal.SIGKILL and not over
