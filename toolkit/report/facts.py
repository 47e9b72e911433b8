"""What a report says of a run in words."""

from collections.abc import Iterator, Sequence

from toolkit.report.summary import DATA_BOUND, Ending, Summary
from toolkit.run.comparison import differences


def rows(
    state: tuple[str, str],
    summary: Summary,
    pace: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Pairs of a label, empty where it continues, and what there is to say; `state` is that of
    the run, and why (`record.state_of`)."""
    yield "ended", _ended(state, summary.ending)
    tokens = summary.tokens
    trained = f", {tokens:,} trained tokens up to the last logged one" if tokens else ""
    yield "steps", f"{summary.steps:,} done{trained}"
    if summary.losses is not None:
        first, last = summary.losses
        path = f"{first.value:.4f} at step {first.step:,} → {last.value:.4f} at {last.step:,}"
        yield "loss", path
    if summary.validation is not None:
        yield (
            "validation",
            f"{summary.validation.value:.4f} at step {summary.validation.step:,}",
        )
    starts = (
        f"{summary.starts:,}, {len(summary.restarts):,} of them by the launcher after a failure"
    )
    if summary.restarts_after_stop:
        starts += f", {summary.restarts_after_stop:,} although a signal had stopped the run"
    yield "starts", starts
    for reason in summary.restarts:
        yield "", f"- {reason}"
    yield "checkpoints", _checkpoints(summary)
    if (share := summary.data_wait_share) is not None and share >= DATA_BOUND:
        waited = f"{share:.0%} of the step time was spent waiting for batches"
        yield "data", f"{waited}: the run is bound by its data (is `data.cache` a local disk?)"
    for sentence in pace:
        yield "pace", sentence
    event = summary.prediction
    if event is not None and {"predicted", "measured", "measured_over_predicted"} <= set(event):
        yield from differences(event)


def _ended(state: tuple[str, str], ending: Ending) -> str:
    if ending.state == "finished":
        return "finished (exit code 0)"
    if ending.state == "stopped":
        why = f" by {ending.why}" if ending.why else ""
        return f"stopped{why} after saving (exit code {ending.exit_code}); can be resumed"
    if ending.state == "failed":
        return f"failed (exit code {ending.exit_code}): {ending.why}"
    name, why = state
    return "not yet: it is running" if name == "running" else why


def _checkpoints(summary: Summary) -> str:
    saves = summary.saves
    if not saves.count:
        return "none written"
    said = f"{saves.count:,} written, the last at step {saves.last_step:,}"
    if saves.stall_s is not None:
        said += f"; training stood still for {saves.stall_s:.2f} s each"
    if saves.commit_s is not None:
        said += f"; {saves.commit_s:.2f} s until committed"
    return said
