"""Many kills at random moments: a run that is started again always becomes the same run."""

import random
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ZERO_2, Project
from tests.e2e.product import curve, started, steps_logged

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

TRIALS = 15
OFTEN = {"checkpoint.every_steps": 2}


@pytest.mark.parametrize("engine", ["ddp", "zero_2"])
def test_kills_at_random_moments(
    project: Project, engine: str, ddp_run: Path, zero_2_run: Path
) -> None:
    chance = random.Random(engine)
    expected = curve({"ddp": ddp_run, "zero_2": zero_2_run}[engine])
    changes = OFTEN | ({} if engine == "ddp" else ZERO_2)
    for trial in range(TRIALS):
        name = f"soak-{engine}-{trial}"
        run_dir = project.folder / name
        with started(project.command(name, changes), project.folder) as command:
            stop_at = chance.randint(1, 18)
            command.wait_for(lambda: steps_logged(run_dir) >= stop_at, f"step {stop_at}")  # noqa: B023
            time.sleep(chance.random() * 0.05)
            ranks = command.ranks()
            if ranks:  # else it has ended already
                ranks[chance.choice(sorted(ranks))].kill()
            command.end()
        ended = project.launch(name, changes)
        assert ended.code == 0, ended.err
        found = curve(run_dir)
        assert found.keys() == expected.keys()
        for step, (loss, norm) in expected.items():
            assert found[step] == pytest.approx((loss, norm), rel=1e-6), (trial, step)
