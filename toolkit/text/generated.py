"""Write and check files that a command generates. Generators own files of this repository. A
user's file may be replaced only by the command that wrote it."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import PlanError


def write_or_check(description: str, module: str, texts: Mapping[Path, str]) -> int:
    """The command line of a generator: write `texts`, or with `--check` name those that are not
    current. Returns 1 when the check found one, else 0.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only say whether all are current")
    only_check = parser.parse_args().check
    stale = [
        path
        for path, text in texts.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if only_check:
            print(f"{path} is out of date: run python -m {module}", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    return int(only_check and bool(stale))


def check_out(
    file: Path, header: str, command: str = "this command", option: str = "--out"
) -> None:
    """Check, before any work, that a command may write its `--out`. Raises PlanError if the
    folder cannot be written. Also if the file exists and does not begin with `header`, so that
    no file of the user's is overwritten."""
    try:
        ours = not file.exists() or file.read_text(encoding="utf-8").startswith(header)
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise PlanError(
            f"{option}: {file} exists and was not written by {command}",
            fix="name another file, or remove it",
        )
    if not os.access(file.absolute().parent, os.W_OK):
        raise PlanError(f"{option}: cannot write into {file.parent}", fix="name another folder")
