"""What every rank of a short measurement of bandwidth does, by the real code."""

import os

from toolkit.cli.main import main
from toolkit.extras.doctor import bandwidth


def bandwidth_alone() -> int:
    """`dmt doctor --bandwidth --json`, with nothing but its standard output."""
    bandwidth.BUDGET_S = 0.02
    bandwidth.CPU_SIZES = (6, 4096)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return main(["doctor", "--bandwidth", "--json"])
