"""Bars in the commands' terminal output."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from rich.text import Text

from toolkit.cli.console import Console
from toolkit.plan.cost.prediction import basis
from toolkit.plan.estimate import Estimate, memory_parts, time_parts
from toolkit.plan.search import Room
from toolkit.system.handlers import handling
from toolkit.text.units import GIB, seconds, size

BAR_WIDTH = 24
"""Characters of a full bar."""
COLOURS: Mapping[Room, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}
"""Of what is said about a layout's memory."""


def bars(parts: Mapping[str, float], whole: float, unit: str) -> Iterator[Text]:
    """One line per part that is not zero; bars are shares of `whole`. Unit: GiB or s."""
    for part, amount in parts.items():
        if amount > 0:
            share = min(1.0, amount / whole)
            bar = "█" * round(share * BAR_WIDTH)
            shown = seconds(amount) if unit == "s" else size(amount)
            yield Text.assemble(f"    {part:<22}{shown:>10}  ", (bar, "cyan"))


def memory_lines(found: Estimate) -> Iterator[Text]:
    """Memory by part, and whether it fits."""
    needed, total = found.needed, found.memory.total / GIB
    capacity = needed.capacity_gib
    stage = f", pipeline stage {found.memory.stage}" if found.setup.layout.pp > 1 else ""
    if capacity is None:
        yield Text.assemble(("  memory per process", "dim"), f"  {size(total)}{stage}")
    else:
        verdict = (found.room, COLOURS[found.room])
        used = f"  {needed.memory_gib:.1f} of {capacity:.4g} GiB: "
        yield Text.assemble(("  memory per GPU", "dim"), used, verdict, (stage, "dim"))
    yield from bars(memory_parts(found.memory), capacity or total, "GiB")
    if needed.memory_gib > total * 1.001:
        yield Text(f"    {needed.memory_gib:.1f} GiB while the model is built")
    for place, taken in (("host", needed.host_gib), ("NVMe", needed.nvme_gib)):
        if taken:
            yield Text(f"    {place} of each node: {taken:,.0f} GiB")


def time_lines(found: Estimate) -> Iterator[Text]:
    """The step's time, speed and utilization, and its parts."""
    time, cluster = found.time, found.setup.cluster
    per = "process" if cluster.gpu.memory_gib is None else "GPU"
    speed = f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per {per}"
    nominal = ""
    if basis(cluster) == "nominal":
        nominal = " (nominal CPU speeds: `dmt doctor --calibrate` measures this one's)"
    yield Text.assemble(("  step", "dim"), f"  {seconds(time.total_s)}: {speed}{nominal}")
    if time.mfu_causal is not None:
        yield Text(
            f"    MFU {time.mfu_causal:.1%}, HFU {time.hfu_causal:.1%}, attention as masked "
            f"({time.mfu_full:.1%}, {time.hfu_full:.1%} in full)"
        )
    yield from bars(time_parts(time), time.total_s, "s")


@contextmanager
def count_progress(total: int, kind: str = "") -> Iterator[Callable[..., None]]:
    """How many of `total` are done, on standard error where that is a terminal; call the result
    with what rich's `Progress.update` takes. SIGTERM cleans up as Ctrl-C does."""
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), MofNCompleteColumn(), TextColumn(f"{kind}{{task.description}}")
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with handling([signal.SIGTERM], signal.default_int_handler), bar:
        yield partial(bar.update, bar.add_task("", total=total))


@contextmanager
def byte_progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, when that is a terminal; call the result with bytes done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    if not console.is_terminal:  # rich 14.0 prints a line even if it is disabled
        yield lambda _: None
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(BAR_WIDTH), DownloadColumn(), Speed())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)
