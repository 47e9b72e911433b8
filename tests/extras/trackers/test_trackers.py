"""Every tracker has every number once, by its own reader, whatever is killed; and no secret."""

import fcntl
import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import HANG_S, ROOT, wait_until
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.system.install import install
from toolkit.track.metrics import Metrics, MetricsLog
from toolkit.track.service import TrackerFollower
from toolkit.track.trackers import TRACKERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of MLflow's reader
]

CANARY = "canary-7d1f2c9b"
Points = dict[str, list[tuple[int, float]]]


class TrackedTrainer:
    """What rank 0 does: metrics, events, and a follower."""

    def __init__(self, folder: Path, tracker: str, resume: int = 0) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.logs.mkdir(parents=True, exist_ok=True)
        self.events = EventLog(self.run.events)
        self.metrics = MetricsLog.resume(self.run.metrics, resume, self.events)
        settings: Mapping[str, Mapping[str, Any]] = {
            "mlflow": {"experiment": "tests", "tracking_uri": f"sqlite:///{folder}/mlflow.db"},
            "trackio": {"project": "tests"},
        }
        own = settings.get(tracker, {})
        self.follower = TrackerFollower(self.run, tracker, own, "a run", self.events)

    def steps(self, *steps: int) -> None:
        for step in steps:
            loss = math.nan if step == 3 else float(step)
            numbers = (1.0, 1e-3, 64, 100.0, 0.1, 0.0, None, 8 * step, 64 * step, False, None)
            self.metrics.write(Metrics(step, loss, *numbers, {"accuracy": step / 10}))

    def finish(self) -> None:
        self.events.write("end", exit_code=0)
        assert self.follower.finish(HANG_S) is None, self.log()

    def log(self) -> str:
        return "".join(path.read_text() for path in self.run.logs.iterdir())

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        return self.follower._process


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder / "run/tensorboard"), {"tensors": 0}).Reload()
    return {
        tag.removeprefix("train/"): [
            (one.step, float(make_ndarray(one.tensor_proto))) for one in read.Tensors(tag)
        ]
        for tag in read.Tags()["tensors"]
    }


def mlflow_points(folder: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.params.get("recipe.optimizer.learning_rate", "0.5") == "0.5"
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }
    return {
        name: sorted(((one.step, float(one.value)) for one in history), key=lambda one: one[0])
        for name, history in histories.items()
    }


def trackio_points(_folder: Path) -> Points:
    code = (
        "from trackio.sqlite_storage import SQLiteStorage as s; import json;"
        "(run,) = s.get_runs('tests'); print(json.dumps(s.get_logs('tests', run), default=str))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    (lines,) = jsonl.parse(f'{{"all": {done.stdout.strip()}}}'.encode())
    found: Points = {}
    for line in lines["all"]:
        for name, value in line.items():
            if name not in ("timestamp", "step"):
                found.setdefault(name, []).append((line["step"], float(value)))
    return found


READERS = {
    "tensorboard": tensorboard_points, "mlflow": mlflow_points, "trackio": trackio_points
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_TOKEN", f"hf_{CANARY}")
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)


def test_all_are_read_here() -> None:
    assert {*READERS, "wandb"} == {*TRACKERS.names}, "W&B's are read in test_wandb.py"


@pytest.mark.parametrize("tracker", READERS)
def test_each_number_once(tracker: str, tmp_path: Path) -> None:
    first = TrackedTrainer(tmp_path, tracker)
    first.run.recipe.write_text("optimizer: {learning_rate: 0.5}\n")
    first.steps(1, 2, 3, 4)
    first.events.write("evaluation", step=4, loss=0.25, **{"validation/a%b": 0.5})
    wait_until(lambda: is_stored(tracker, tmp_path, 4), "the fourth step")
    # The follower dies together with its trainer, as when a container is ended.
    with first.process as follower:
        follower.kill()
    # Steps 3 and 4, behind the last checkpoint, are done again.
    second = TrackedTrainer(tmp_path, tracker, resume=2)
    second.steps(3, 4, 5)
    second.events.write("evaluation", step=4, loss=0.25, **{"validation/a%b": 0.5})
    second.events.write("evaluation", step=5, loss=0.125)
    second.finish()
    third = TrackedTrainer(tmp_path, tracker, resume=5)
    third.steps(6)
    third.events.write("skip", step=6, why="a spike", loss=9.0)
    third.finish()
    points = READERS[tracker](tmp_path)
    steps = {name: [step for step, _ in found] for name, found in points.items()}
    every = [1, 2, 3, 4, 5, 6]
    assert steps["loss"] == steps["accuracy"] == steps["consumed_tokens"] == every
    assert [value for _, value in points["accuracy"]] == pytest.approx([s / 10 for s in every])
    assert [str(value) for _, value in points["loss"]] == [
        "1.0",
        "2.0",
        "nan",
        "4.0",
        "5.0",
        "6.0",
    ]
    assert steps["evaluation/loss"] == [4, 5]
    assert [name for name in steps if name.startswith("validation/")] == [
        "validation/a_b" if tracker == "mlflow" else "validation/a%b"
    ]
    assert all(found == [4] for name, found in steps.items() if name.startswith("validation/"))
    assert steps["skip/loss"] == [6]
    assert "mfu" not in steps and "step" not in steps
    assert_private(tmp_path)


def is_stored(tracker: str, folder: Path, step: int) -> bool:
    if tracker == "mlflow":  # its own reader would create the tables, too
        with (
            closing(sqlite3.connect(folder / "mlflow.db")) as database,
            suppress(sqlite3.Error),
        ):
            command = "select step from metrics where key = 'evaluation/loss'"
            return database.execute(command).fetchall() == [(step,)]
        return False
    file = folder / {"tensorboard": "run/tensorboard", "trackio": "trackio/tests.db"}[tracker]
    points = READERS[tracker](folder) if file.exists() else {}
    return [one for one, _ in points.get("evaluation/loss", [])] == [step]


def assert_private(folder: Path) -> None:
    """No secret, and no word of how it was started."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 2
    for file in files:
        content = file.read_bytes()
        assert CANARY.encode() not in content, file
        assert sys.executable.encode() not in content, file


_KILLED = """
import sys
from pathlib import Path
from tests.extras.trackers.test_trackers import TrackedTrainer
trainer = TrackedTrainer(Path(sys.argv[1]), sys.argv[2])
trainer.steps(1, 2)
print(trainer.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("tracker", READERS)
def test_a_killed_trainer(tracker: str, tmp_path: Path) -> None:
    """The follower posts what is there and ends; one that comes at once waits for it."""
    argv = [sys.executable, "-c", _KILLED, str(tmp_path), tracker]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout is not None
        follower = psutil.Process(int(trainer.stdout.readline()))
        trainer.kill()
    second = TrackedTrainer(tmp_path, tracker)
    second.steps(1, 2, 3)
    second.finish()
    psutil.wait_procs([follower], timeout=HANG_S)
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    assert [step for step, _ in READERS[tracker](tmp_path)["loss"]] == [1, 2, 3]


def test_one_follower_at_a_time(tmp_path: Path) -> None:
    """It waits for the one of an earlier start, which still posts: whose log is locked."""
    (tmp_path / "run/logs").mkdir(parents=True)
    with (tmp_path / "run/logs/tensorboard.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        trainer = TrackedTrainer(tmp_path, "tensorboard")
        trainer.steps(1)

        def waits() -> bool:
            locks = Path("/proc/locks").read_text().splitlines()
            return any("->" in one and str(trainer.process.pid) in one.split() for one in locks)

        wait_until(waits, "a follower that waits")
        assert not trainer.run.tensorboard.exists()
        # Whoever stops the job signals all of it; the follower ends with its trainer.
        assert os.getsid(trainer.process.pid) == trainer.process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            trainer.process.send_signal(number)
    trainer.finish()
    assert tensorboard_points(tmp_path)["loss"] == [(1, 1.0)]


OF_OTHER_RUNS = {
    "wandb": {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_MODE", "WANDB_SERVICE"},
    "tensorboard": set(),
    "mlflow": {"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"},
    "trackio": set(),
}


@pytest.mark.parametrize("tracker", TRACKERS.names)
def test_its_environment(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a run around this one, and no rank: launchers end what has one."""
    unwanted = {"RANK", *OF_OTHER_RUNS[tracker]}
    for name in unwanted:
        monkeypatch.setenv(name, "0")
    with TrackedTrainer(tmp_path, tracker).process as follower:
        process, found = psutil.Process(follower.pid), dict[str, str]()

        def has_begun() -> bool:  # before, it has no environment, or this process's
            found.clear()
            found.update(process.environ())
            return "SOME_TOKEN" in found

        wait_until(has_begun, "the follower's environment")
        follower.kill()
    assert found["SOME_TOKEN"] == CANARY
    assert not unwanted & found.keys()


_TALKATIVE = """
import os
print("this is", os.environ["SOME_TOKEN"], flush=True)
raise ImportError("not here: " + os.environ["SOME_TOKEN"])
"""


@pytest.mark.parametrize("tracker", READERS)
def test_a_missing_package(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "shadow" / tracker
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text(_TALKATIVE)
    monkeypatch.setenv("PYTHONPATH", f"{shadow.parent}:{os.environ.get('PYTHONPATH', ROOT)}")
    trainer = TrackedTrainer(tmp_path, tracker)
    trainer.steps(1)
    trainer.events.write("end", exit_code=0)
    told = str(trainer.follower.finish(HANG_S))
    title, extra = TRACKERS[tracker].title, TRACKERS[tracker].extra
    how = install(extra) if extra else f"pip install {tracker}"
    reason = f"it cannot be imported (not here: ***); {how}"
    assert told.startswith(f"{title} is off: {reason}. ")
    assert "this is ***" in trainer.log()
    (warning,) = [one for one in jsonl.read(trainer.run.events) if one["kind"] == "warning"]
    assert warning["source"] == tracker
    logged = [trainer.run.events, *trainer.run.logs.iterdir()]
    assert all(CANARY not in file.read_text() for file in logged)


@pytest.mark.parametrize("tracker", READERS)
def test_a_store_that_cannot_be_written(tracker: str, tmp_path: Path) -> None:
    """A file where its folder, or a folder where its file, belongs; root may write all else."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("")
    (tmp_path / "trackio").write_text("")
    (tmp_path / "mlflow.db").mkdir()
    trainer = TrackedTrainer(tmp_path, tracker)
    trainer.steps(1)
    trainer.events.write("end", exit_code=0)
    told = str(trainer.follower.finish(20.0))  # MLflow tries again for minutes
    assert told.startswith(f"{TRACKERS[tracker].title} is off: "), told
    assert told.count("\n") == 0 and "Traceback" not in told
    assert trainer.follower.problem() is None, "told once"
