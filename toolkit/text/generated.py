"""Files of this repository that a command writes: each generator writes them or checks them."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


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
