# SPDX-License-Identifier: Apache-2.0
"""Pinned upstream releases: patches/<tag>/base.toml, and which of them a user's REF means."""
import pathlib
import re
import tomllib
from dataclasses import dataclass, field

from .errors import Usage

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Base:
    """One pinned release.

    `commit` may be abbreviated (an sdist names only nine digits). `overlay` lists the files of vllm_overlay/ that this
    base takes. `wheels` maps the platform tag of each official wheel to its sha256,
    `rebuilt` names the Python files that its build takes from elsewhere. `folder` holds base.toml, series, the patches and lock.json; `overlay_root` the overlay files.
    """

    tag: str
    version: str
    commit: str
    sdist_sha256: str
    repository: str
    default: bool
    overlay: tuple[str, ...]
    folder: pathlib.Path
    overlay_root: pathlib.Path
    wheels: dict[str, str] = field(default_factory=dict)
    rebuilt: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        """False for a release that `drift` or `rebase` looks at and that has no hash yet."""
        return bool(self.sdist_sha256)

    def is_commit(self, sha: str) -> bool:
        """Whether `sha`, full or at least 7 digits of it, names the pinned commit."""
        sha = sha.lower()
        return bool(re.fullmatch(r"[0-9a-f]{7,40}", sha)) and (sha.startswith(self.commit) or self.commit.startswith(sha))


def load_base(folder: pathlib.Path, overlay_root: pathlib.Path) -> Base:
    """Read `folder`/base.toml. Raises Usage with the key that is missing or wrong."""
    path = folder / "base.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Base(tag=data["tag"], version=data["version"], commit=data["commit"].lower(), sdist_sha256=data["sdist_sha256"].lower(),
                    repository=data["repository"], default=bool(data.get("default", False)), overlay=tuple(data.get("overlay", [])),
                    folder=folder, overlay_root=overlay_root, wheels={k: v.lower() for k, v in data.get("wheels", {}).items()}, rebuilt=tuple(data.get("rebuilt", [])))  # fmt: skip
    except FileNotFoundError:
        raise Usage(f"{path} is missing", "each folder under patches/ needs a base.toml") from None
    except tomllib.TOMLDecodeError as e:
        raise Usage(f"{path}: {e}") from None
    except KeyError as e:
        raise Usage(f"{path}: the key {e} is missing") from None


def load_bases(root: pathlib.Path = ROOT) -> list[Base]:
    """Every base under `root`/patches, oldest version first."""
    folders = sorted((p for p in (root / "patches").iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    bases = [load_base(folder, root / "vllm_overlay") for folder in folders]
    if not bases:
        raise Usage(f"no base under {root / 'patches'}")
    if sum(b.default for b in bases) != 1:
        raise Usage(f"{root / 'patches'}: exactly one base.toml must say `default = true`")
    return bases


_RELEASE = re.compile(r"v?(\d+(?:\.\d+)+(?:\.?(?:post|rc)\d+)?)")


def unpinned(ref: str, like: Base) -> Base:
    """A release that is no base yet, named by tag or version. Raises Usage if `ref` is neither."""
    match = _RELEASE.fullmatch(ref)
    if not match:
        raise Usage(f"{ref!r} is neither a release (v0.32.0) nor an existing path", "name a release, or for a branch or commit the path of a clone that has it checked out")
    return Base(f"v{match[1]}", match[1], "", "", like.repository, False, like.overlay, like.folder.parent / f"v{match[1]}", like.overlay_root)


def find_base(ref: str | None, bases: list[Base]) -> Base:
    """The base that `ref` names: a tag (with or without `v`), or the pinned commit, full or abbreviated. None: the default."""
    if ref is None or ref == "":
        return next(b for b in bases if b.default)
    for base in bases:
        if ref in (base.tag, base.version) or base.is_commit(ref):
            return base
    pinned = ", ".join(f"{b.tag} ({b.commit})" for b in bases)
    default = next(b for b in bases if b.default)
    if _RELEASE.fullmatch(ref):
        advice = f"choose one of them; python apply.py drift --ref {ref}   says how far the stack is from that release, and rebase --to {ref} carries it there"
    else:
        advice = f"python apply.py apply --ref {default.tag}; how far the stack is from a branch or another commit says   python apply.py drift --ref CLONE   where CLONE is a clone that has it checked out"
    raise Usage(f"{ref!r} is not a pinned base; the pinned ones are {pinned}", advice)
