"""No sample is lost or seen twice, however often a run is stopped and laid out anew."""

from itertools import pairwise

import pytest

from tests.e2e.conftest import Project
from tests.e2e.hooks import hooked
from tests.e2e.product import assert_saved_and_stopped, curve, records, started

pytestmark = pytest.mark.slow

STEPS = 18
GLOBAL_BATCH = 16
SETTINGS: dict[str, object] = {
    "training.steps": STEPS,
    "training.global_batch_size": GLOBAL_BATCH,
    "training.sequence_length": 64,
    "optimizer.learning_rate": 3e-4,  # larger ones amplify what rounding differs in
    "checkpoint.export": "false",
}


def layout(
    processes: int, micro_batch: int, engine: str, **degrees: object
) -> dict[str, object]:
    degrees = {f"parallel.{name}": value for name, value in degrees.items()}
    return degrees | {
        "cluster.gpus_per_node": processes,
        "training.micro_batch_size": micro_batch,
        "parallel.engine": engine,
    }


def samples_in_order(project: Project, run_dir: str) -> list[int]:
    """The samples that a run consumed; fails when two ranks disagree about a share."""
    shares: dict[tuple[int, int], list[int]] = {}
    for path in (project.folder / run_dir / "samples").iterdir():
        for line in records(path):
            key = line["step"], line["data_rank"]
            assert shares.setdefault(key, line["samples"]) == line["samples"]
    return [sample for key in sorted(shares) for sample in shares[key]]


def stop_at(project: Project, run_dir: str, first: int, last: int, changes) -> None:
    """Start the run, which is at step `first`, and stop it by SIGTERM in step `last`."""
    fault = hooked("logged_samples", DMT_FAILPOINTS=f"step=stop@rank0,hit{last - first}")
    argv = project.command(run_dir, SETTINGS | changes)
    with started(argv, project.folder, fault) as command:
        command.terminate_in_step(last)
        assert_saved_and_stopped(command.end(), project.folder / run_dir)


def test_every_sample_once_an_epoch(project: Project) -> None:
    project.launch("unbroken", SETTINGS, env=hooked("logged_samples"))
    expected = samples_in_order(project, "unbroken")
    assert len(expected) == STEPS * GLOBAL_BATCH
    per_epoch = max(expected) + 1
    assert per_epoch < STEPS * GLOBAL_BATCH, "the run reaches a second epoch"
    assert per_epoch % GLOBAL_BATCH, "a batch lies in both"

    in_both = per_epoch // GLOBAL_BATCH + 1
    parts = [
        (4, layout(2, 2, "deepspeed", **{"zero.stage": 2})),
        (9, layout(1, 4, "ddp")),
        (in_both, layout(2, 4, "megatron", tensor=2)),
    ]
    stops = [0, *(step for step, _ in parts)]
    for (first, last), (_, changes) in zip(pairwise(stops), parts, strict=True):
        stop_at(project, "broken", first, last, {"checkpoint.keep": 1} | changes)
    project.launch("broken", SETTINGS | layout(2, 8, "fsdp"), env=hooked("logged_samples"))

    found = samples_in_order(project, "broken")
    assert found == expected
    assert sorted(found[:per_epoch]) == list(range(per_epoch))
    assert len(set(found[per_epoch:])) == len(found) - per_epoch
    losses, unbroken = (
        [loss for loss, _ in curve(project.folder / name).values()]
        for name in ("broken", "unbroken")
    )
    assert losses == pytest.approx(unbroken, rel=1e-5)
