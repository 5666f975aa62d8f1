#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line of vllm-dcp-stack. Needs Python 3.11 and git 2.39, nothing else: `python apply.py --help`."""
import os
import pathlib
import sys

if sys.version_info < (3, 11):
    sys.exit(f"error: Python {sys.version.split()[0]} is too old: 3.11 or newer is needed")

if sys.getfilesystemencoding().lower() != "utf-8":  # file names and authors are UTF-8, whatever the locale says
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "scripts"))

from patchstack.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
