"""The progress report: a bar on a terminal, plain lines in a log file."""

import io
from dataclasses import replace

from rich.console import Console

from toolkit.run.metrics import Metrics
from toolkit.run.progress import ProgressReport

LINE = Metrics(
    10, 2.34567, 1.25, 3e-4, 1024, 20480.0, 0.5, 0.0, 0.412, 80, 10_240, False, 71.26
)


def test_plain_lines_without_a_terminal():
    file = io.StringIO()
    with ProgressReport(1000, 0, Console(file=file)) as report:
        report.advance(9)
        report.logged(LINE)
        report.message("step 10  validation loss 2.5")
        waiting = replace(LINE, step=20, mfu=None, memory_gib=None, data_wait_s=0.06)
        report.logged(replace(waiting, skipped=True))
    assert file.getvalue().splitlines() == [
        "step 10/1000  loss 2.3457  20,480 tokens/s  MFU 41.2%  grad norm 1.25  lr 3.00e-04"
        "  71.3 GiB",
        "step 10  validation loss 2.5",
        "step 20/1000  loss 2.3457  20,480 tokens/s  grad norm 1.25  lr 3.00e-04"
        "  12% waiting for data  skipped",
    ]


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140, color_system=None)
    with ProgressReport(1000, 5, console) as report:
        report.logged(LINE)
        report.message("saved [step-00000010]")
        report.advance(11)
    shown = file.getvalue()
    assert "11/1000" in shown
    for part in ("loss 2.3457", "20,480 tokens/s", "MFU 41.2%", "left"):
        assert part in shown
    assert "saved [step-00000010]" in shown, "brackets are no markup"


def test_80_columns_are_enough():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with ProgressReport(100_000, 0, console) as report:
        report.logged(replace(LINE, step=99_999, tokens_per_s=1_234_567.0))
    last = [line for line in file.getvalue().splitlines() if "loss" in line][-1]
    for part in ("99999/100000", "loss 2.3457", "1,234,567 tokens/s", "MFU 41.2%", "left -"):
        assert part in last
