"""What every rank of the doctor's measurements does: short ones, by the real code."""

import os

from toolkit.cli.main import main
from toolkit.doctor import bandwidth, speeds
from toolkit.engines.distributed import join, leave


def calibrated() -> speeds.Speeds:
    """The speeds of a short calibration."""
    speeds.BUDGET_S = 0.02
    ranks = join()
    lines: list[str] = []
    found = speeds.measure(ranks, speeds.Sizes(64, 2**20, 2**16), lines.append)
    assert len(lines) == 4, lines
    leave()
    return found


def bandwidth_alone() -> int:
    """`dmt doctor --bandwidth --json`, with nothing but its standard output."""
    bandwidth.BUDGET_S = 0.02
    bandwidth.CPU_SIZES = (6, 4096)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return main(["doctor", "--bandwidth", "--json"])
