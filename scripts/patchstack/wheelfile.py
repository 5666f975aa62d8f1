# SPDX-License-Identifier: Apache-2.0
"""Wheel files: read them safely, and write one that keeps most members of another byte for byte.

Kept members are copied as they lie in the archive, still compressed. New ones are stored uncompressed with a fixed date:
the result depends on its input alone, not on the zlib that this Python has.
"""
import base64
import contextlib
import csv
import hashlib
import io
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Callable, Iterator

from . import workspace
from .errors import Refused
from .patchfile import unsafe_path

NAME = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.!+]+)(-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
_DATE = (1980, 1, 1, 0, 0, 0)
_DATA_DESCRIPTOR = 0x08


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`, its member names checked. Raises Refused if it cannot be read or a name could leave the tree."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                if why := unsafe_path(name.rstrip("/")):
                    raise Refused(f"{path.name}: the member {name!r} {why}", "this is no proper wheel: fetch it again")
            if len(set(names)) != len(names):
                raise Refused(f"{path.name} has two members of one name", "this is no proper wheel: fetch it again")
            yield archive
    except (zipfile.BadZipFile, EOFError) as e:
        raise Refused(f"{path} cannot be read as a wheel: {e}", "remove it and run the same command again") from None


def digest(data: bytes) -> str:
    """The hash of a file as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def parse_record(data: bytes) -> dict[str, tuple[str, str]]:
    """RECORD: path -> (hash, size); both empty for RECORD itself."""
    return {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(data.decode())) if len(row) == 3}


def format_record(record: dict[str, tuple[str, str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([path, *entry] for path, entry in record.items())
    return out.getvalue().encode()


class Writer:
    """Writes a wheel whose RECORD comes last; `finish` must be called."""

    def __init__(self, path: pathlib.Path, dist_info: str) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._record_path = f"{dist_info}/RECORD"
        self._record: dict[str, tuple[str, str]] = {}

    def keep(self, source: zipfile.ZipFile, info: zipfile.ZipInfo, recorded: tuple[str, str]) -> None:
        """Copy a member without unpacking it."""
        stream = source.fp
        stream.seek(info.header_offset)
        header = stream.read(30)
        if header[:4] != b"PK\3\4":
            raise Refused(f"{source.filename}: the member {info.filename!r} has no header where the directory says", "fetch the wheel again")
        stream.seek(sum(struct.unpack("<HH", header[26:30])), os.SEEK_CUR)
        new = zipfile.ZipInfo(info.filename, info.date_time)
        for field in ("compress_type", "create_system", "create_version", "extract_version", "external_attr", "internal_attr", "CRC", "compress_size", "file_size"):
            setattr(new, field, getattr(info, field))
        new.flag_bits = info.flag_bits & ~_DATA_DESCRIPTOR
        out = self._archive.fp
        out.seek(self._archive.start_dir)
        new.header_offset = out.tell()
        out.write(new.FileHeader())
        left = info.compress_size
        while left:
            block = stream.read(min(left, 1 << 20))
            if not block:
                raise Refused(f"{source.filename}: the member {info.filename!r} is cut short", "fetch the wheel again")
            out.write(block)
            left -= len(block)
        # zipfile has no public way to add a member that is compressed already.
        self._archive.start_dir = out.tell()
        self._archive.filelist.append(new)
        self._archive.NameToInfo[new.filename] = new
        self._archive._didModify = True
        self._record[info.filename] = recorded

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a new member."""
        self._store(path, data, mode)
        self._record[path] = (digest(data), str(len(data)))

    def _store(self, path: str, data: bytes, mode: int) -> None:
        info = zipfile.ZipInfo(path, _DATE)
        info.create_system = 3
        info.external_attr = (0o100000 | mode) << 16
        self._archive.writestr(info, data)

    def finish(self) -> None:
        self._record[self._record_path] = ("", "")
        self._store(self._record_path, format_record(self._record), 0o644)
        self._archive.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._archive.fp.close()
        self._archive.fp = None  # nothing is written any more, also not by the destructor


def check_record(path: pathlib.Path, progress: Callable[[int, int], None]) -> None:
    """Read every member and compare it with RECORD. Raises Refused with the first that differs."""
    with opened(path) as archive:
        members = archive.infolist()
        record = parse_record(archive.read(next(m.filename for m in members if m.filename.endswith(".dist-info/RECORD"))))
        for number, member in enumerate(members):
            progress(number, len(members))
            wanted = record.pop(member.filename, None)
            if member.filename.endswith(".dist-info/RECORD"):
                continue
            hasher, size = hashlib.sha256(), 0
            with archive.open(member) as stream:
                while block := stream.read(1 << 20):
                    hasher.update(block)
                    size += len(block)
            found = "sha256=" + base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode()
            if wanted != (found, str(size)):
                raise Refused(f"{path.name}: {member.filename} is {found} ({size} bytes), RECORD says {wanted}", "fetch the wheel again")
        progress(len(members), len(members))
        if record:
            raise Refused(f"{path.name}: RECORD lists {sorted(record)[0]}, the archive does not have it", "fetch the wheel again")


@contextlib.contextmanager
def new_file(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A scratch file beside `target` that becomes it in one step if the block ends well; what killed runs left is removed."""
    with workspace.scratch(target.parent, f".{target.name}.") as folder:
        scratch = folder / target.name
        yield scratch
        with scratch.open("rb") as f:
            os.fsync(f.fileno())
        scratch.chmod(0o644)
        os.replace(scratch, target)
