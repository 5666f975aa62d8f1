# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per sub-command, led by its help text.

A command module has `HELP` (its first line is the summary), `configure(parser)` and `run(args, ui) -> int`.
"""
import argparse
import importlib
import shutil
import sys

from .. import workspace
from ..errors import Refused, StackError
from ..git import require_git
from ..pins import ROOT
from ..report import Ui

COMMANDS = ("apply", "verify", "status", "unapply", "export", "lint", "bases", "drift", "rebase", "carve", "wheel", "bundle")

EXIT_CODES = """\
exit codes: 0 ok, 1 findings, 2 usage, 3 refused (dirty tree, wrong base, git too old, no room),
4 stopped for a human (a patch does not apply), 5 upstream unreachable and not cached, 70 a bug."""


# These may finish what a killed `export` left half-done in patches/; the others only say so.
FINISHING = ("apply", "unapply", "export", "rebase", "wheel", "bundle")


def _parser(argv: list[str]) -> tuple[argparse.ArgumentParser, dict[str, object]]:
    parser = argparse.ArgumentParser(prog="apply.py", description="Apply, check and maintain the vllm-dcp-stack patches on a pinned vLLM release.",
                                     epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {}
    for name in argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS:  # the others are needed for the list of commands only
        module = modules[name] = importlib.import_module(f".{name}", __name__)
        sub = subparsers.add_parser(name, help=module.HELP.splitlines()[0], description=module.HELP, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, with its schema version")
        sub.add_argument("-v", "--verbose", action="store_true", help="show the git commands on stderr")
        module.configure(sub)
    return parser, modules


def _finish_export(args, ui: Ui) -> None:
    """See to what a killed `export` left half-done in patches/, which every command reads."""
    patches = ROOT / "patches"
    if not (patches / ".patchstack").is_dir():
        return
    from .. import export

    if left := export.interrupted(patches, ui.note):
        if args.command not in FINISHING or getattr(args, "dry_run", False):
            raise Refused(f"`{left.command}` was interrupted while it changed {len(left.changes)} files in {patches} and {ROOT / 'vllm_overlay'}",
                          "run it again: it first finishes or takes back what is half-done (so do apply, unapply and wheel)")  # fmt: skip
        with export.held(patches, ui.note):
            pass


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code. Expected failures print a message and the next step, never a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")  # names that are no UTF-8 are shown as they are
    parser, modules = _parser(argv)
    args = parser.parse_args(argv)
    ui = Ui(args.command, as_json=args.json, verbose=args.verbose)
    try:
        require_git(ui.git)
        _finish_export(args, ui)
        return modules[args.command].run(args, ui)
    except StackError as e:
        ui.error(type(e).__name__, e.message, e.next_step, e.exit_code)
        return e.exit_code
    except OSError as e:
        said = str(e)
        if isinstance(e, shutil.Error) and e.args and isinstance(e.args[0], list):  # a list of (from, to, why)
            said = "\n".join(f"{to}: {why}" for _, to, why in e.args[0][:4])
        elif e.strerror:
            said = f"{e.filename}: {e.strerror}" if e.filename else e.strerror
        refused = Refused(said, "mend that (space, permissions, path) and run the same command again; nothing was half-done")
        ui.error("OSError", refused.message, refused.next_step, refused.exit_code)
        return refused.exit_code
    except KeyboardInterrupt:
        ui.error("Interrupted", "interrupted; nothing was half-done", "run the same command again", 130)
        return 130
    except Exception:
        import traceback

        traceback.print_exc()
        ui.error("Bug", "this is a bug in vllm-dcp-stack", "report it with the lines above", 70)
        return 70
    finally:
        workspace.leave()
        ui.close()
