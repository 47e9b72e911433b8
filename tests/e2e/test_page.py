"""The page of a real run that was killed, skipped a batch and was resumed, in a browser."""

from pathlib import Path

import pytest

from tests.browser import browser
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
    for dark in (False, True):
        with browser(dark=dark, width=420 if dark else 1400) as tab:
            tab.open(f"file://{project.folder / 'seen.html'}")
            assert tab.errors() == []
            assert len(tab.requests()) == 1, "the page itself, and nothing else"
            assert tab.inaccessible() == []
            too_wide = "document.documentElement.scrollWidth > innerWidth"
            assert not tab.run(too_wide)
            for kind, step in (("skip", 3), ("resume", 8)):
                mark = f"document.querySelector('[data-chart=loss] .mark.{kind}')"
                assert tab.run(f"{mark}.dataset.step") == str(step)
                # Steps 1 to 20 are the width of the chart.
                share = f"{mark}.offsetLeft / {mark}.parentElement.offsetWidth"
                assert tab.run(share) == pytest.approx((step - 1) / 19, abs=0.02)
            text = tab.run("document.querySelector('main').innerText")
            for said in (
                "finished (exit code 0)",
                "the loss is not finite",
                "logged steps are",
            ):
                assert said in text
