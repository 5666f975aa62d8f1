# SPDX-License-Identifier: Apache-2.0
"""Commits on top of commits, made by one `git fast-import`: no index of the whole tree is read or written."""
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import workspace
from .errors import GitError
from .git import IDENTITY, Git

_REF = b"refs/patchstack/made"
_PLAIN_NAME = re.compile(rb"[^\x00-\x20.,:;<>\"\\'][^\x00-\x1f<>]*[^\x00-\x20.,:;<>\"\\']")
_PLAIN_MAIL = re.compile(rb"[A-Za-z0-9][^\x00-\x20<>\"\\]*[A-Za-z0-9]")


@dataclass(frozen=True)
class Author:
    """`date`: as a mail header or as `@<seconds> <zone>` has it."""

    name: str
    mail: str
    date: str


class Committer:
    """Use it with `with`: the commits are there for other commands after the block."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._marks: dict[str, int] = {}

    def __enter__(self) -> "Committer":
        with contextlib.ExitStack() as stack:
            self._said = stack.enter_context(workspace.temporary_file())
            self._process = self._git.popen("fast-import", "--quiet", "--done", "--date-format=rfc2822", stdout=-1, stderr=self._said)
            self._close = stack.pop_all()
        return self

    def __exit__(self, kind, *_) -> None:
        with self._close:
            if kind is not None:
                self._process.kill()  # it would wait for the rest for ever
            else:
                self._send(b"reset %b\nfrom %b\n\ndone\n" % (_REF, b"0" * 40))  # git wants a branch to commit to; it goes again
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            if self._process.wait() and kind is None:
                raise self._failed()

    def _failed(self) -> GitError:
        self._said.seek(0)
        return GitError(["git", "fast-import"], self._process.wait(), self._said.read().decode("utf-8", "replace"))

    def _send(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def _ask(self, question: bytes) -> str:
        self._send(question)
        answer = self._process.stdout.readline()
        if not answer:
            raise self._failed()
        return answer.decode("utf-8", "surrogateescape").rstrip("\n")

    def commit(self, parent: str, message: bytes, author: Author, files: Mapping[str, str | bytes | None]) -> tuple[str, str]:
        """One commit on `parent`; return (commit, tree). `files`: path -> `<mode> <blob id>`, content, or None to delete it."""
        mark = len(self._marks) + 1
        out = [b"commit %b\nmark :%d\nauthor %b\ncommitter %b\n" % (_REF, mark, self._ident(author), self._ident(Author(*IDENTITY, author.date))), _counted(message)]
        out.append(b"from %b\n" % (b":%d" % self._marks[parent] if parent in self._marks else parent.encode()))
        for path, there in files.items():
            name = quoted(path)
            if there is None:
                out.append(b"D %b\n" % name)
            elif isinstance(there, bytes):
                out.append(b"M 100644 inline %b\n%b" % (name, _counted(there)))
            else:
                out.append(b"M %b %b\n" % (there.encode(), name))
        self._send(b"".join([*out, b"\n"]))
        commit = self._ask(b"get-mark :%d\n" % mark)
        tree = self._ask(b'ls :%d ""\n' % mark).split(" ")[2].split("\t")[0]
        self._marks[commit] = mark
        return commit, tree

    def _ident(self, author: Author) -> bytes:
        """Name, mail and date in git's form. Names that git would clean are left to git."""
        name, mail = author.name.encode("utf-8", "surrogateescape"), author.mail.encode("utf-8", "surrogateescape")
        if not _PLAIN_NAME.fullmatch(name) or not _PLAIN_MAIL.fullmatch(mail):
            cleaned = self._git.run("var", "GIT_AUTHOR_IDENT", env={"GIT_AUTHOR_NAME": author.name, "GIT_AUTHOR_EMAIL": author.mail, "GIT_AUTHOR_DATE": "@0 +0000"})
            return cleaned.rpartition(b">")[0] + b"> " + author.date.encode()
        return b"%b <%b> %b" % (name, mail, author.date.encode())


def _counted(data: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(data), data)


def quoted(path: str) -> bytes:
    """A path as fast-import reads it."""
    name = path.encode("utf-8", "surrogateescape")
    return b'"' + name.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
