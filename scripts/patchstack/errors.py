# SPDX-License-Identifier: Apache-2.0
"""Expected failures, each with the exit code that the command line returns for it.

A message names what was found, where, and what was expected; `next_step` is the command or action that helps.
"""

import re

OK = 0
FINDINGS = 1


class StackError(Exception):
    """Base of every expected failure. Anything else that escapes is a bug (exit code 70)."""

    exit_code = 70

    def __init__(self, message: str, next_step: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


class Usage(StackError):
    """The command line or a configuration file is wrong."""

    exit_code = 2


class Refused(StackError):
    """A precondition does not hold: dirty tree, wrong base, a git that is too old, no room to write."""

    exit_code = 3


class Conflict(StackError):
    """A patch does not apply: a human has to decide."""

    exit_code = 4


class Unavailable(StackError):
    """Upstream can neither be reached nor found in the cache."""

    exit_code = 5


def cannot_write(stderr: str) -> bool:
    """Whether git says that it could not write: a full or read-only disk. Not every message of git names the reason."""
    return bool(re.search(r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied|(unable|failed) to write|(could not|cannot|couldn't) write|write error", stderr))


def fatal_first(said: str) -> list[str]:
    """The lines to show of what git said: why it stopped, whatever it said after that, then the last others."""
    lines = [line for line in said.splitlines() if line.strip()]
    why = [line for line in lines if line.startswith("fatal:")]
    return why + [line for line in lines[-3:] if line not in why]


class GitError(StackError):
    """A git command failed in a way that the caller did not expect."""

    def __init__(self, argv: list[str], returncode: int, stderr: str) -> None:
        shown = " ".join(argv)
        lines = [line for line in stderr.splitlines() if line.strip()]
        said = "\n".join(sorted(lines, key=lambda line: not line.startswith("fatal:")))
        super().__init__(f"`{shown}` failed with exit code {returncode}:\n{said or '(no message)'}")
        self.argv = argv
        self.returncode = returncode
        self.stderr = stderr
        if re.search(r"Unable to create '.*\.lock': File exists", stderr):
            self.exit_code = Refused.exit_code
            self.next_step = "wait until the other git command has ended, or remove that lock file from the tree if there is none; nothing was changed"
        elif cannot_write(stderr):
            self.exit_code = Refused.exit_code
            self.next_step = "make room (is there space on the disk?) or choose another --dest, cache folder or TMPDIR, then run the same command again; nothing was changed"
