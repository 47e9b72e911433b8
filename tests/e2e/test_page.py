"""The page of a real run that was killed, skipped a batch and was resumed."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import dmt, events, run, settings, tool

pytestmark = pytest.mark.slow

FAULTY_WORKER = Path(__file__).with_name("faulty_worker.py")
CHANGES = {
    "checkpoint.every_steps": 4,
    "checkpoint.asynchronous": False,  # step 8 is saved when rank 1 is killed
    "checkpoint.export": False,
    "evaluation.every_steps": 5,
}


def test_a_kill_a_skip_and_a_resume(project: Project) -> None:
    run_dir = project.folder / "seen"
    worker = ("torchrun", "--standalone", "--nproc-per-node", "2", FAULTY_WORKER)
    argv = tool(*map(str, worker), project.recipe, "--run-dir", run_dir)
    faults = {"DMT_TEST_FAULT": "nan@1,3", "DMT_FAILPOINTS": "step=kill@rank1,hit11"}
    assert run([*argv, *settings(CHANGES)], project.folder, faults).code != 0
    project.launch(run_dir.name, CHANGES)
    (skip,), (resume,) = events(run_dir, "skip"), events(run_dir, "resume")
    assert (skip["step"], resume["step"]) == (3, 8)
    run(dmt("report", run_dir, "--html", "seen.html"), project.folder, code=0)
    page = (project.folder / "seen.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", page), "nothing is fetched"
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    marks = {one["step"] for one in json.loads(data)["marks"]}
    assert marks >= {3, 8}
    for said in ("the loss is not finite", "logged steps are", "What happened", "exit code 0"):
        assert said in page
