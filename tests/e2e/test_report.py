"""`dmt report` of real runs: finished, killed and started again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import dmt, events, records, run

pytestmark = pytest.mark.slow

ONE_RANK = {"cluster.gpus_per_node": 1, "checkpoint.export": False, "checkpoint.every_steps": 5}


def report(run_dir: Path) -> dict[str, Any]:
    ended = run(dmt("report", run_dir, "--json"), run_dir.parent, code=0)
    found: dict[str, Any] = json.loads(ended.out)
    spent = [part for part in found["time_s"].values() if part is not None]
    assert all(part >= 0 for part in spent)
    assert sum(spent) == pytest.approx(found["total_s"])
    return found


def test_a_finished_run(ddp_run: Path) -> None:
    found = report(ddp_run)
    assert found["ending"]["state"] == "done"
    trained = records(ddp_run / "metrics.jsonl")[-1]["consumed_tokens"]
    assert (found["steps"], found["tokens"], found["starts"]) == (20, trained, 1)
    assert 19 * 8 * 32 < trained < 20 * 8 * 32, "all but those behind the ends of documents"
    assert found["losses"]["last"]["value"] < found["losses"]["first"]["value"]
    assert found["validation"]["step"] == found["saves"]["last_step"] == 20
    spent = found["time_s"]
    assert 0 < spent["productive"] < found["total_s"]
    assert spent["evaluation"] > 0 and spent["saving"] > 0
    assert (spent["loading"], spent["replayed"], spent["skipped"]) == (0, 0, 0)


def test_a_finished_run_is_compared_with_its_prediction(ddp_run: Path) -> None:
    (event,) = events(ddp_run, "prediction")
    plan = json.loads((ddp_run / "plan.json").read_text())
    assert event["predicted"] == plan["predicted"]
    assert event["predicted"]["basis"] == "nominal"
    measured = event["measured"]
    assert measured["steps"] == 19 and event["step"] == 20
    assert 0 < measured["step_time_s"] < 60
    assert 0.1 < measured["process_gib"] < 16


def test_a_run_that_was_killed_and_started_again(project: Project) -> None:
    run_dir = project.folder / "reported-killed"
    kill = {"DMT_FAILPOINTS": "step=kill@rank0,hit9"}
    # Step 5 is saved when it is killed.
    settings = {**ONE_RANK, "checkpoint.asynchronous": False}
    assert project.launch(run_dir.name, settings, env=kill, code=None).code != 0
    killed = report(run_dir)
    assert killed["ending"]["state"] in ("running", "failed")
    assert (killed["steps"], killed["saves"]["last_step"]) == (8, 5)
    project.launch(run_dir.name, settings)
    again = report(run_dir)
    assert again["ending"]["state"] == "done"
    trained = records(run_dir / "metrics.jsonl")[-1]["consumed_tokens"]
    assert (again["steps"], again["tokens"], again["starts"]) == (20, trained, 2)
    assert again["time_s"]["replayed"] != 0, "steps 6 to 8 were done twice"
    assert again["total_s"] > killed["total_s"]
    assert again["idle_s"] is not None
