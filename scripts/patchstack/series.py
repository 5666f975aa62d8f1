# SPDX-License-Identifier: Apache-2.0
"""patches/<base>/series: the order of the patches, and the state of every topic on that base.

    # a comment, kept
    <topic>.patch
    part <topic> <topic that contains it>
    upstream <topic> <version> <pull request>
    n/a <topic> <reason>
"""
import pathlib
import re
from dataclasses import dataclass

from .errors import Usage

TOPIC = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True)
class TopicState:
    """`state`: patched, upstream or n/a. `detail`: the version and pull request, or the reason."""

    topic: str
    state: str
    detail: str
    line: int


@dataclass(frozen=True)
class Series:
    path: pathlib.Path
    patches: tuple[str, ...]  # topics, in order
    states: dict[str, TopicState]  # every topic named
    text: str


def parse_series(text: str, path: pathlib.Path) -> Series:
    """Read a series file. Raises Usage as `path:line: why`."""
    patches: list[str] = []
    states: dict[str, TopicState] = {}

    def bad(number: int, why: str) -> Usage:
        return Usage(f"{path}:{number}: {why}")

    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        words = line.split()
        if len(words) == 1 and line.endswith(".patch"):
            state = TopicState(line.removesuffix(".patch"), "patched", "", number)
            patches.append(state.topic)
        elif words[0] == "upstream" and len(words) == 4:
            state = TopicState(words[1], "upstream", f"{words[2]} ({words[3]})", number)
        elif words[0] == "part" and len(words) == 3:
            if words[2] not in patches:
                raise bad(number, f"{words[2]!r} is not a patch listed above")
            state = TopicState(words[1], "patched", f"in {words[2]}", number)
        elif words[0] == "n/a" and len(words) >= 3:
            state = TopicState(words[1], "n/a", " ".join(words[2:]), number)
        else:
            raise bad(number, f"cannot read {line!r}: expected `<topic>.patch`, `part <topic> <topic>`, `upstream <topic> <version> <PR>` or `n/a <topic> <reason>`")
        if not TOPIC.fullmatch(state.topic):
            raise bad(number, f"{state.topic!r} is not a topic name (lower-case letters, digits, dots and dashes)")
        if state.topic in states:
            raise bad(number, f"{state.topic!r} is listed twice, first in line {states[state.topic].line}")
        states[state.topic] = state
    return Series(path, tuple(patches), states, text)


def load_series(folder: pathlib.Path) -> Series:
    """Read `folder`/series."""
    path = folder / "series"
    try:
        return parse_series(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise Usage(f"{path} is missing", "create it, empty if there is no patch yet") from None


def rewrite_series(text: str, topics: list[str]) -> str:
    """`text` with its patch lines replaced by `topics` in that order; comments stay above the patch they stood above,
    `part` lines below the patch that contains them; they leave with it."""
    if not any(line.strip().endswith(".patch") and len(line.split()) == 1 for line in text.splitlines()):
        return text + "".join(f"{topic}.patch\n" for topic in topics)
    above: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    pending: list[str] = []
    for line in text.splitlines():
        if line.strip().endswith(".patch") and len(line.split()) == 1:
            above[line.strip().removesuffix(".patch")] = pending
            pending = []
        elif line.split()[:1] == ["part"]:
            parts.setdefault(line.split()[2], []).append(line)
        else:
            pending.append(line)
    out: list[str] = []
    for topic in topics:
        out += above.pop(topic, [])
        out += [f"{topic}.patch", *parts.get(topic, [])]
    for comments in above.values():  # of patches that left the series: keep what was said there
        out += comments
    return "\n".join([*out, *pending]).rstrip("\n") + "\n" if [*out, *pending] else ""
