# SPDX-License-Identifier: Apache-2.0
"""Read the files of an sdist without unpacking it. Nothing in it may lead outside its folder, or fill the memory."""
import contextlib
import gzip
import pathlib
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

from .errors import Refused
from .patchfile import unsafe_path

# A vLLM sdist has some 9,000 files, 140 MB unpacked, the largest 3 MB.
MOST_MEMBERS, MOST_BYTES, LARGEST_FILE = 50_000, 1 << 30, 64 << 20
_NO_SDIST = "this is no proper sdist: fetch it again"


class _Bounded:
    """The unpacked stream, which ends with an error where an archive unpacks to more than any sdist has."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name, self._left = stream, name, MOST_BYTES

    def read(self, size: int = -1) -> bytes:
        if size > LARGEST_FILE or size < 0:
            raise Refused(f"{self._name} wants {size} bytes at once: no sdist has a file of more than {LARGEST_FILE >> 20} MiB", _NO_SDIST)
        self._left -= size
        if self._left < 0:
            raise Refused(f"{self._name} unpacks to more than {MOST_BYTES >> 20} MiB", _NO_SDIST)
        return self._stream.read(size)

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        skipped = offset - self._stream.tell()
        if whence or skipped < 0:
            raise Refused(f"{self._name} is read backwards", _NO_SDIST)
        while skipped > 0:  # a gzip stream reads what it skips
            skipped -= len(self.read(min(skipped, 1 << 20))) or skipped
        return self._stream.tell()


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Iterator[tuple[str, bool, bytes]]]:
    """(path below the top folder, executable, content) of each file, one after the other. Raises Refused on whatever no sdist has."""
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=_Bounded(stream, path.name), mode="r:") as archive:
            yield _members(archive, path.name)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise Refused(f"{path} cannot be read as a tar archive: {e}", "remove it and run the same command again") from None


def _members(archive: tarfile.TarFile, name: str) -> Iterator[tuple[str, bool, bytes]]:
    top = None
    files, folders = set(), set()
    for number, member in enumerate(archive):
        if number == MOST_MEMBERS:
            raise Refused(f"{name} has more than {MOST_MEMBERS} members", _NO_SDIST)
        path = member.name.removeprefix("./").rstrip("/")
        first, _, rest = path.partition("/")
        top = top or first
        if first != top or (why := unsafe_path(path)):
            raise Refused(f"{name}: the member {member.name!r} {why if first == top else f'lies outside {top}/'}", _NO_SDIST)
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise Refused(f"{name}: the member {member.name!r} is a link, a device or has holes; an sdist has only whole files", _NO_SDIST)
        if not rest:
            raise Refused(f"{name}: the member {member.name!r} is a file where the folder of the sdist should be", _NO_SDIST)
        if member.size > LARGEST_FILE:
            raise Refused(f"{name}: the member {member.name!r} has {member.size} bytes, more than any file of an sdist", _NO_SDIST)
        above = {rest[:at] for at in range(len(rest)) if rest[at] == "/"}
        if rest in files or rest in folders or above & files:
            raise Refused(f"{name}: the member {member.name!r} is there twice, or is a file and a folder", _NO_SDIST)
        files.add(rest)
        folders |= above
        data = archive.extractfile(member).read()
        if len(data) != member.size:
            raise Refused(f"{name} ends inside {member.name!r}", "remove it and run the same command again")
        yield rest, bool(member.mode & 0o111), data
