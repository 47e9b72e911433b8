"""Progress of a run: a bar on a terminal, otherwise a line per logged step."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from toolkit.run.metrics import Metrics
from toolkit.text.terminal import printable, tell

_SHOWN_WAIT = 0.01
"""Share of the step time from which waits are shown."""


class ProgressReport:
    """Rank 0's view of the run on standard error. A context manager.

    `advance` belongs in every step, `logged` after every line of metrics.jsonl.
    """

    def __init__(self, total_steps: int, done_steps: int, console: Console) -> None:
        self._console = console
        self._total = total_steps
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=10),
                TextColumn("{task.fields[summary]}", style="cyan", markup=False),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                speed_estimate_period=600,  # seconds; steps may take minutes
            )
            # The time left comes from steps of this process only, not of resumed ones.
            self._task = self._bar.add_task(
                "train", total=total_steps, completed=done_steps, summary=""
            )

    def __enter__(self) -> "ProgressReport":
        if self._bar is not None:
            self._bar.start()
            self._console.show_cursor(True)  # a rank that is killed cannot give it back
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def logged(self, metrics: Metrics) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, summary=_summary(metrics))
        else:
            step = f"step {metrics.step}/{self._total}"
            self._plain(f"{step}  {_summary(metrics)}  {_details(metrics)}")

    def message(self, text: str) -> None:
        """Show one line for the user: a save, an evaluation, a warning."""
        if self._bar is not None:
            self._console.print(Text(printable(text)))
        else:
            self._plain(text)

    def _plain(self, text: str) -> None:
        # Not through the console: it would wrap lines at 80 columns in a log file.
        tell(text, self._console.file)


def _summary(metrics: Metrics) -> str:
    """What fits next to a bar in 80 columns."""
    parts = [f"loss {metrics.loss:.4f}", f"{metrics.tokens_per_s:,.0f} tokens/s"]
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    return "  ".join(parts)


def _details(metrics: Metrics) -> str:
    parts = [f"grad norm {metrics.grad_norm:.3g}", f"lr {metrics.lr:.2e}"]
    if metrics.memory_gib is not None:
        parts.append(f"{metrics.memory_gib:.1f} GiB")
    if (waited := metrics.data_wait_s / metrics.step_time_s) >= _SHOWN_WAIT:
        parts.append(f"{waited:.0%} waiting for data")
    if metrics.skipped:
        parts.append("skipped")
    return "  ".join(parts)
