"""`launch/accelerate/*.yaml`: the files for `accelerate launch` that need no recipe.

python -m toolkit.accelerate.common            write them
python -m toolkit.accelerate.common --check    exit 1 when one is not current
"""

import argparse
import sys
from pathlib import Path

from toolkit.accelerate.config import COMMON, render_common

FOLDER = Path(__file__).parents[2] / "launch" / "accelerate"


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    only_check = parser.parse_args().check
    stale = [name for name in COMMON if not _is_current(name)]
    for name in stale:
        if only_check:
            print(f"{_file(name)} is not current: python -m toolkit.accelerate.common")
        else:
            _file(name).write_text(render_common(name), encoding="utf-8")
    return int(only_check and bool(stale))


def _is_current(name: str) -> bool:
    file = _file(name)
    return file.is_file() and file.read_text(encoding="utf-8") == render_common(name)


def _file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


if __name__ == "__main__":
    sys.exit(main())
