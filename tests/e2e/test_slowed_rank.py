"""A real run in which one rank is slow: what its page and its events say."""

import pytest

from tests.e2e.conftest import Project
from tests.e2e.hooks import hooked
from tests.e2e.product import curve, dmt, events, records, run

pytestmark = pytest.mark.slow


def test_samples_move_to_the_faster_rank(project: Project) -> None:
    """At a checkpoint of a run that is not restarted for it; and a restart continues so."""
    batch = {
        "training.global_batch_size": 12,
        "training.micro_batch_size": 3,
        "checkpoint.every_steps": 2,
        "evaluation.every_steps": "null",
    }
    project.launch("even", batch)
    for steps in (12, 20):
        moving = {"parallel.balance": "auto", "training.steps": steps}
        project.launch("moved", batch | moving, env=hooked("slow_rank"))
    run_dir = project.folder / "moved"
    (event,) = events(run_dir, "balance")
    fast, slow = event["shares"]
    assert fast > slow
    assert event["from_step"] == event["step"] + 2
    rounds = 12 // (fast + slow)
    lines = records(run_dir / "samples" / "rank-0.jsonl")
    first = event["from_step"] + 1
    counts = [(line["step"], len(line["samples"])) for line in lines]
    assert counts == [(n, rounds * fast if n >= first else 6) for n in range(1, 21)]
    losses = [
        {step: loss for step, (loss, _) in curve(folder).items()}
        for folder in (run_dir, project.folder / "even")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    straggler, _again = events(run_dir, "straggler")  # one of each start
    assert straggler["slow_rank"] == 1 and straggler["slower"] > 1.25
    said = " ".join(run(dmt("report", "moved"), project.folder).out.split())
    assert "rank 1 on" in said and f"[{fast}, {slow}] samples" in said
