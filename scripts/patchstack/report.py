# SPDX-License-Identifier: Apache-2.0
"""What the tool says: results on stdout (text or JSON), everything else on stderr. Models never print; this module never computes."""
import json
import os
import sys
import time
from typing import Any, TextIO

SCHEMA = 1
_COLOURS = {"green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2"}


class Ui:
    """One per run. `as_json`: stdout carries exactly one JSON object, `{"schema": 1, "command": ..., ...}`."""

    def __init__(self, command: str, *, as_json: bool = False, verbose: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.command = command
        self.as_json = as_json
        self.verbose = verbose
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self._progress_open = False
        self._last_progress = 0.0

    def _wants_colour(self, stream: TextIO) -> bool:
        return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def paint(self, text: str, colour: str, stream: TextIO | None = None) -> str:
        """`text` in `colour` if the stream is a terminal that wants it."""
        return f"\033[{_COLOURS[colour]}m{text}\033[0m" if self._wants_colour(stream or self.out) else text

    def _print(self, text: str, stream: TextIO, *, end: str = "\n", flush: bool = False) -> None:
        """Print; a reader that has left (`| head -1`) changes nothing of what the command does."""
        try:
            print(text, file=stream, end=end, flush=flush)
        except BrokenPipeError:
            self._nobody_reads(stream)

    @staticmethod
    def _nobody_reads(stream: TextIO) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

    def close(self) -> None:
        """The command is over: nothing may fail any more when the interpreter flushes."""
        self.end_progress()
        for stream in (self.out, self.err):
            try:
                stream.flush()
            except BrokenPipeError:
                self._nobody_reads(stream)

    def say(self, text: str = "") -> None:
        """A line for the reader; left out under --json."""
        if not self.as_json:
            self.end_progress()
            self._print(text, self.out)

    def note(self, text: str) -> None:
        """A line about the run itself, on stderr, also under --json."""
        self.end_progress()
        self._print(text, self.err, flush=True)

    def git(self, shown: str) -> None:
        """A git command about to run, shown with -v."""
        if self.verbose:
            self.note(self.paint(f"+ {shown}", "dim", self.err))

    def progress(self, label: str, done: int, total: int) -> None:
        """A counter that overwrites itself on a terminal; one line per label elsewhere, so that logs stay short."""
        if self.err.isatty():
            now = time.monotonic()
            if done < total and now - self._last_progress < 0.05:
                return
            self._last_progress = now
            self._print(f"\r\033[K{label} {done}/{total}", self.err, end="", flush=True)
            self._progress_open = True
            if done >= total:
                self.end_progress()
        elif done == 0:
            self._print(f"{label} ({total})", self.err, flush=True)

    def step(self, text: str) -> None:
        """A long step begins."""
        self.note(self.paint(text, "dim", self.err))

    def end_progress(self) -> None:
        if self._progress_open:
            self._print("\r\033[K", self.err, end="", flush=True)
            self._progress_open = False

    def result(self, payload: dict[str, Any]) -> None:
        """The machine-readable result; printed under --json only."""
        if self.as_json:
            self._print(json.dumps({"schema": SCHEMA, "command": self.command, **payload}, indent=1, sort_keys=False), self.out)

    def error(self, kind: str, message: str, next_step: str | None, exit_code: int) -> None:
        self.end_progress()
        if self.as_json:
            self.result({"error": {"kind": kind, "message": message, "next": next_step, "exit_code": exit_code}})
        self._print(f"{self.paint('error:', 'red', self.err)} {message}", self.err)
        if next_step:
            self._print(f"next: {next_step}", self.err, flush=True)


def table(rows: list[list[str]], header: list[str]) -> str:
    """Plain aligned columns."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in [header, ["-" * w for w in widths], *rows]]
    return "\n".join(lines)
