"""`launch/accelerate/*.yaml`: the files for `accelerate launch` that need no recipe.

python -m toolkit.accelerate.common            write them
python -m toolkit.accelerate.common --check    exit 1 when one is not current
"""

import sys
from pathlib import Path

from toolkit.foreign.accelerate_file import COMMON, render_common
from toolkit.text.generated import write_or_check

FOLDER = Path(__file__).parents[2] / "launch" / "accelerate"


def main() -> int:
    """Write or check the files."""
    texts = {FOLDER / f"{name}.yaml": render_common(name) for name in COMMON}
    return write_or_check(__doc__.partition("\n")[0], "toolkit.accelerate.common", texts)


if __name__ == "__main__":
    sys.exit(main())
