# SPDX-License-Identifier: Apache-2.0
"""apply.py bundle"""
import pathlib
import shlex

from .. import bundle, wheel
from ..errors import OK, Usage
from ..pins import ROOT, find_base, load_bases
from ..report import table

HELP = """\
Make a bundle for a GPU host without network: parts of at most 60 MiB and one script that assembles them and runs a command.

The host needs Linux x86-64, Python 3.12, PyTorch 2.11 with CUDA 13, Triton, transformers and pytest. The bundle brings the patched
vLLM with the compiled extensions that sparse MLA uses, the packages that vLLM imports, and this project's tests/ and bench/.
--layer is for kernels and layers, with a stub for flash-attention; --engine for the whole engine and its server, with flash-attention 3
and the kernels of experts. Flash-attention 2, the Rust front end and kernels of other models are left out.
"""


def configure(parser) -> None:
    parser.add_argument("--ref", default=None, help="a pinned release (default: the default base)")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="the directory to make; an older bundle there is replaced (default: dist/bundle-KIND in this project)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--layer", dest="kind", action="store_const", const="layer", default="layer", help="what tests of kernels and layers need (default)")
    kind.add_argument("--engine", dest="kind", action="store_const", const="engine", help="what the whole engine needs")
    parser.add_argument("--part-size", type=float, default=60, metavar="MIB", help="the largest size of a part (default: 60)")
    parser.add_argument("--wheel", type=pathlib.Path, default=None, help="the official wheel, if you have it already")
    parser.add_argument("--source", default="auto", help="where the pinned source comes from, as for `apply`")
    parser.add_argument("--dry-run", action="store_true", help="say what would go in, write nothing but the cache")


def run(args, ui) -> int:
    if args.part_size <= 0:
        raise Usage(f"--part-size {args.part_size} is not positive")
    base = find_base(args.ref, load_bases())
    bundle.requirements(base, args.kind)
    platform = wheel.choose_platform(base, bundle.PLATFORM)
    patched = wheel.prepare(base, platform, args.source, args.wheel.expanduser().absolute() if args.wheel else None, ui)
    found = bundle.segments(patched, args.kind, ROOT, ui)
    out = (args.out or ROOT / "dist" / f"bundle-{args.kind}").expanduser().absolute()
    payload = {"base": base.tag, "kind": args.kind, "version": patched.version, "patchset": patched.lock.patchset, "out": str(out), "dry_run": args.dry_run,
               "left_out": list(bundle.left_out(args.kind)), "files": {name: len(listed) for name, listed in found.items()}}  # fmt: skip
    if args.dry_run:
        ui.say(table([[name, str(len(listed))] for name, listed in found.items()], ["segment", "files"]))
    else:
        packed = [bundle.pack(name, listed, ui) for name, listed in found.items()]
        manifest = bundle.write(patched, args.kind, packed, out, int(args.part_size * (1 << 20)), ui)
        payload.update(segments=manifest["segments"], parts=manifest["parts"], entry=str(out / bundle.ENTRY))
        ui.say(table([[p.name, str(len(found[p.name])), f"{p.unpacked / 1e6:.1f} MB", f"{p.size / 1e6:.1f} MB"] for p in packed], ["segment", "files", "unpacked", "packed"]))
        ui.say(table([[p["name"], f"{p['size'] / (1 << 20):.1f} MiB"] for p in manifest["parts"]], ["part", "size"]))
        ui.say(f"wrote {out}: vLLM {patched.version}, {args.kind} bundle")
        ui.say(f"next, on the GPU host: python {bundle.ENTRY} --parts {shlex.quote(str(out))} --into DIR -- python -m pytest --base {base.tag} tests/gpu")
    ui.result(payload)
    return OK
