# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per sub-command, led by its help text.

A command module has a docstring (its help; the first line is the summary), `configure(parser)` and `run(args, ui) -> int`.
"""
import argparse
import importlib
import os
import sys
import traceback

from ..errors import Refused, StackError
from ..git import require_git
from ..report import Ui

COMMANDS = ("apply", "verify", "status", "unapply", "export", "lint", "bases", "drift", "rebase", "carve", "wheel", "bundle")

EXIT_CODES = """\
exit codes: 0 ok, 1 findings, 2 usage, 3 refused (dirty tree, wrong base, git too old, no room),
4 stopped for a human (a patch does not apply), 5 upstream unreachable and not cached, 70 a bug."""


def _parser() -> tuple[argparse.ArgumentParser, dict[str, object]]:
    parser = argparse.ArgumentParser(prog="apply.py", description="Apply, check and maintain the vllm-dcp-stack patches on a pinned vLLM release.",
                                     epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {}
    for name in COMMANDS:
        module = modules[name] = importlib.import_module(f".{name}", __name__)
        summary = module.__doc__.strip().splitlines()[0]
        sub = subparsers.add_parser(name, help=summary, description=module.__doc__.strip(), epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, with its schema version")
        sub.add_argument("-v", "--verbose", action="store_true", help="show the git commands on stderr")
        module.configure(sub)
    return parser, modules


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code. Expected failures print a message and the next step, never a traceback."""
    parser, modules = _parser()
    args = parser.parse_args(argv)
    ui = Ui(args.command, as_json=args.json, verbose=args.verbose)
    try:
        require_git(ui.git)
        return modules[args.command].run(args, ui)
    except StackError as e:
        ui.error(type(e).__name__, e.message, e.next_step, e.exit_code)
        return e.exit_code
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        refused = Refused(f"{where}{e.strerror or e}", "mend that (space, permissions, path) and run the same command again; nothing was half-done")
        ui.error("OSError", refused.message, refused.next_step, refused.exit_code)
        return refused.exit_code
    except KeyboardInterrupt:
        ui.error("Interrupted", "interrupted; nothing was half-done", "run the same command again", 130)
        return 130
    except Exception:
        traceback.print_exc()
        ui.error("Bug", "this is a bug in vllm-dcp-stack", "report it with the lines above", 70)
        return 70
    finally:
        ui.end_progress()
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the reader left: nothing more to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
