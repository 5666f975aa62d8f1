# SPDX-License-Identifier: Apache-2.0
"""Upstream's history of the touched paths, from a repository that `carve` made: who moved a line, and who took our patch."""
import pathlib
from collections.abc import Callable

from . import foreign
from .drift import CLEAN, OFFSET, UPSTREAM, Drift, Region, pull_requests
from .errors import Refused, Usage
from .pins import Base
from .releases import Release
from .report import Ui
from .stack import StackFiles, patch_id


class History:
    """A carved repository. Raises Usage if `folder` is none."""

    def __init__(self, folder: pathlib.Path, ui: Ui) -> None:
        place = foreign.find(folder) if folder.is_dir() else None
        map_file = place.common_dir / "filter-repo" / "commit-map" if place else folder
        if not map_file.is_file():
            raise Usage(f"{folder} is not a repository that `carve` made: it has no filter-repo/commit-map", "python apply.py carve CLONE --out DIR")
        self.folder = folder
        self.git = foreign.opened_for_good(place, ui.git)
        rows = [line.split() for line in map_file.read_text().splitlines()[1:]]
        self._carved_of = {old: new for old, new in rows}
        self._upstream_of = {new: old for old, new in rows if set(new) != {"0"}}

    def _commit(self, base: Base) -> str:
        """The carved commit of a release: its tag, else the pinned commit through the map."""
        found = self.git.resolve(f"refs/tags/{base.tag}^{{commit}}")
        if found is None and base.commit:
            found = next((new for old, new in self._carved_of.items() if old.startswith(base.commit) and set(new) != {"0"}), None)
        if found is None:
            raise Refused(f"{self.folder} knows neither the tag {base.tag} nor commit {base.commit or '(unknown)'}", "carve a clone that has both releases")
        return found

    def _range(self, base: Base, release: Release) -> str:
        return f"{self._commit(base)}..{self._commit(release.base)}"

    def _name(self, carved: str, subject: str) -> str:
        return f"{self._upstream_of.get(carved, carved)[:12]} {subject}"

    def mover(self, base: Base, release: Release) -> Callable[[Region], str | None]:
        """A function that names the upstream commit behind a conflict: the newest one between the releases that added or removed a line of it."""
        between = self._range(base, release)

        def find(region: Region) -> str | None:
            changed = [line for line in [*region.base, *region.theirs] if line.strip() and (line in region.base) != (line in region.theirs)]
            for line in sorted(changed, key=len, reverse=True)[:4]:
                out = self.git.text("log", "-1", "--format=%H%x09%s", "-S", line, between, "--", region.path)
                if out:
                    return self._name(*out.split("\t", 1))
            return None

        return find

    def add_signals(self, drift: Drift, files: StackFiles, base: Base, release: Release) -> None:
        """Two more signs that upstream has a patch: a commit with the same patch-id, and the squash commit of a pull request that the patch names."""
        between = self._range(base, release)
        log = self.git.run("log", "-p", "--no-textconv", "--no-ext-diff", "--no-renames", "--full-index", "--no-color", "--format=commit %H", between)
        ids = dict(line.split(" ") for line in self.git.text("patch-id", "--stable", input=log).splitlines())
        subjects = dict(line.split("\t", 1) for line in self.git.text("log", "--format=%H%x09%s", between).splitlines())
        for patch, report in zip(files.patches, drift.patches, strict=True):
            if commit := ids.get(patch_id(self.git, patch)):
                signal = f"patch-id: the same change is upstream's {self._name(commit, subjects[commit])}"
                if report.state in (CLEAN, OFFSET):
                    signal += "; but it still applies here: was it reverted?"
                else:
                    report.state, report.regions = UPSTREAM, []
                report.signals.insert(0, signal)
            for number in pull_requests(patch):
                if found := next((c for c, s in subjects.items() if s.endswith(f"(#{number})")), None):
                    report.signals.append(f"declared: pull request {number} was merged as {self._name(found, subjects[found])}")
