# SPDX-License-Identifier: Apache-2.0
"""apply.py wheel"""
import pathlib
import shlex

from .. import wheel, wheelfile
from ..downloads import sha256
from ..errors import OK
from ..pins import ROOT, find_base, load_bases

HELP = """\
Make a patched wheel: the official wheel of the pin with the patched Python files laid in. No compiler is needed.

The official wheel comes through your own pip configuration and is checked by hash, and its Python files must be those of the
pinned source. The patched one has the local version `+dcp<patch-set hash>`; compiled parts stay byte for byte. `vllm.__patchset__`
names the stack, and dcp_stack.json in its dist-info says what it is made of. The same input gives the same bytes.
"""


def configure(parser) -> None:
    parser.add_argument("--ref", default=None, help="a pinned release (default: the default base)")
    parser.add_argument("--platform", default=None, help="platform tag of the official wheel, or a machine: manylinux_2_28_x86_64, aarch64 (default: this machine)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", help="the directory to write the wheel to (default: dist in this project)")
    parser.add_argument("--wheel", type=pathlib.Path, default=None, help="the official wheel, if you have it already")
    parser.add_argument("--source", default="auto", help="where the pinned source comes from, as for `apply`")
    parser.add_argument("--dry-run", action="store_true", help="check everything, write nothing but the cache")


def run(args, ui) -> int:
    base = find_base(args.ref, load_bases())
    platform = wheel.choose_platform(base, args.platform)
    given = args.wheel.expanduser().absolute() if args.wheel else None
    patched = wheel.prepare(base, platform, args.source, given, ui)
    folder = args.out.expanduser().absolute()
    payload = {"base": base.tag, "platform": platform, "version": patched.version, "wheel": str(folder / wheel.wheel_name(patched)), "dry_run": args.dry_run,
               "official": {"name": patched.official.name, "sha256": base.wheels[platform]}, "patchset": patched.lock.patchset,
               "left_out": list(patched.left_out)}  # fmt: skip
    if args.dry_run:
        with wheelfile.opened(patched.official) as archive:
            kinds = wheel.kinds_of_change(patched, archive.namelist())
    else:
        path, kinds = wheel.write(patched, folder, ui)
        payload.update(sha256=sha256(path), size=path.stat().st_size)
    payload["files"] = kinds
    count = {kind: sum(k == kind for k in kinds.values()) for kind in ("replaced", "added", "removed")}
    done = ", ".join(f"{n} {kind}" for kind, n in count.items() if n)
    ui.say(f"{'would write' if args.dry_run else 'wrote'} {payload['wheel']}: vLLM {patched.version}, {done} of the official wheel's files")
    if patched.left_out:
        ui.say(f"left out, since no wheel carries them: {', '.join(patched.left_out)}")
    if not args.dry_run:
        ui.say(f"next: pip install {shlex.quote(payload['wheel'])}")
    ui.result(payload)
    return OK
