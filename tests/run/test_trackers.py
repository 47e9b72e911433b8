"""Every tracker has every number once, over kills and resumes; one that fails ends nothing."""

import json
import math
import os
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from accelerate import tracking

from tests.e2e.product import run as run_command
from tests.forked import ForkedRanks
from tests.processes import HANG_S, wait_until
from toolkit.recipe.schema import LoggingSection
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.metrics import Metrics, MetricsLog
from toolkit.run.trackers import (
    TRACKERS,
    Posted,
    Trackers,
    _Rows,
    trackers_line,
    wanted,
)
from toolkit.system.install import install

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CANARY = "canary-7d1f2c9b"
Points = dict[str, list[tuple[int, float]]]


class Rank0:
    """What rank 0 does around its steps."""

    def __init__(self, folder: Path, tracker: str, resume: int = 0) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.logs.mkdir(parents=True, exist_ok=True)
        self.events = EventLog(self.run.events)
        self.metrics = MetricsLog.resume(self.run.metrics, resume, self.events)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        logging = LoggingSection.model_validate({"trackers": [tracker], "project": "tests"})
        self.trackers = Trackers(self.run, "a run", logging, self.events)

    def steps(self, *steps: int) -> None:
        for step in steps:
            loss = math.nan if step == 3 else float(step)
            numbers = (1.0, 1e-3, 64, 100.0, 0.1, 0.0, None, 8 * step, 64 * step, False, None)
            self.metrics.write(Metrics(step, loss, *numbers, {"accuracy": step / 10}))

    def finish(self, limit_s: float = HANG_S, code: int = 0) -> None:
        self.trackers.finish(limit_s, code)

    def warnings(self) -> list[str]:
        return [e["message"] for e in jsonl.read(self.run.events) if e["kind"] == "warning"]


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "run/tensorboard"), {"scalars": 0}).Reload()
    return {
        tag.removeprefix("train/"): [(one.step, one.value) for one in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def mlflow_points(folder: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.params["recipe.optimizer.learning_rate"] == "0.5"
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
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=True)
    (lines,) = jsonl.parse(f'{{"all": {done.stdout.strip().splitlines()[-1]}}}'.encode())
    found: Points = {}
    for line in lines["all"]:
        for name, value in line.items():
            if name not in ("timestamp", "step"):
                found.setdefault(name, []).append((line["step"], float(value)))
    return found


def _blobs(data: bytes) -> Iterator[bytes]:
    """Split a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    block_size, header_size, last_part = 2**15, 7, (1, 4)
    position, blob = 7, b""
    while position + header_size <= len(data):
        if block_size - position % block_size < header_size:
            position += block_size - position % block_size
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += header_size
        blob += data[position : position + length]
        position += length
        if kind in last_part:
            yield blob
            blob = b""


def wandb_points(folder: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("run/wandb/offline-run-*/*.wandb"))
    records = [Record.FromString(blob) for file in files for blob in _blobs(file.read_bytes())]
    assert len({r.run.run_id for r in records if r.HasField("run")}) == 1, "one id"
    config = {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update}
    assert config["recipe"] == {"optimizer": {"learning_rate": 0.5}}
    environments = [r.environment for r in records if r.HasField("environment")]
    assert not any(e.host or e.args or e.program or e.executable for e in environments)
    found: Points = {}
    for record in records:
        row = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
        if row:
            step = json.loads(row.pop("_step"))
            assert json.loads(row.pop("step")) == step
            for name in row.keys() - {"_runtime", "_timestamp"}:
                found.setdefault(name, []).append((step, float(row[name].strip('"'))))
    return found


READERS: Mapping[str, Callable[[Path], Points]] = {
    "wandb": wandb_points, "tensorboard": tensorboard_points,
    "mlflow": mlflow_points, "trackio": trackio_points,
}  # fmt: skip


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for tracker in TRACKERS.values():  # what a start sets is taken back
        for name in (*tracker.not_inherited, *tracker.environment):
            monkeypatch.setenv(name, "0" * 32)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_TOKEN", f"hf_{CANARY}")
    monkeypatch.setenv("WANDB_API_KEY", CANARY + "0" * 24)
    monkeypatch.setenv("SOME_TOKEN", CANARY)


def killed(folder: Path, tracker: str) -> int:
    """A process that is gone when a tracker has four steps."""
    rank = Rank0(folder, tracker)
    rank.events.write("evaluation", step=0, loss=2.0)
    rank.steps(1, 2, 3, 4)
    rank.events.write("evaluation", step=4, loss=0.25, **{"validation/a%b": 0.5})
    file = rank.run.tracker_state(tracker)

    def is_posted() -> bool:
        assert not rank.warnings()
        names = (Posted.load(file) or Posted("")).names
        if tracker == "wandb":  # it waits for the next step: W&B takes no more of one it has
            return names.get("loss") == 3
        return names.get("evaluation/loss") == 4

    wait_until(is_posted, "the steps")
    os._exit(9)


@pytest.mark.parametrize("tracker", READERS)
def test_each_number_once(tracker: str, tmp_path: Path) -> None:
    assert {*READERS} == {*TRACKERS}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("optimizer: {learning_rate: 0.5}\n")
    ranks = ForkedRanks(killed, (tmp_path, tracker), 1, tmp_path)
    assert ranks.end() == [9], ranks.printed()
    # Steps 3 and 4, behind the last checkpoint, are done again.
    second = Rank0(tmp_path, tracker, resume=2)
    second.steps(3, 4, 5)
    second.events.write("evaluation", step=4, loss=0.25, **{"validation/a%b": 0.5})
    second.events.write("evaluation", step=5, loss=0.125)
    second.events.write("skip", step=6, why="a spike", loss=9.0)
    second.steps(6)
    second.finish(code=75)
    third = Rank0(tmp_path, tracker, resume=6)  # the validation before which it was stopped
    third.events.write("evaluation", step=6, loss=0.0625)
    third.finish()
    assert third.warnings() == []
    points = READERS[tracker](tmp_path)
    steps = {name: [step for step, _ in found] for name, found in points.items()}
    every = [1, 2, 3, 4, 5, 6]
    assert steps["loss"] == steps["accuracy"] == steps["consumed_tokens"] == every
    assert [value for _, value in points["accuracy"]] == pytest.approx([s / 10 for s in every])
    losses = [str(value).lower() for _, value in points["loss"]]
    assert losses == ["1.0", "2.0", "nan", "4.0", "5.0", "6.0"]
    assert (steps["evaluation/loss"], steps["skip/loss"]) == ([0, 4, 5, 6], [6])
    name = "validation/a_b" if tracker == "mlflow" else "validation/a%b"
    assert steps[name] == [4]
    assert "mfu" not in steps
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        content = file.read_bytes()
        assert CANARY.encode() not in content, file
        assert sys.executable.encode() not in content, file


def test_how_to_upload(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank = Rank0(tmp_path, "wandb")
    rank.steps(1)
    rank.finish()
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("to upload the run to W&B: ")
    argv = [sys.executable, "-m", *shlex.split(line.partition(": ")[2]), "--dry-run"]
    told = run_command(argv, tmp_path)
    assert "Would sync 1 run(s)" in told.out + told.err


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def forever(*_: object, **__: object) -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("method", "acts", "reason"),
    [
        ("start", full_disk, "No space left on device"),
        ("log", full_disk, "No space left on device"),
        ("log", forever, "it did not finish within 1 s"),
        ("finish", forever, "it did not finish within 1 s"),
    ],
)
def test_one_that_fails(
    method: str,
    acts: Callable[..., None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One warning, an event, and no time."""
    monkeypatch.setattr(tracking.TensorBoardTracker, method, acts)
    rank = Rank0(tmp_path, "tensorboard")
    began = time.monotonic()
    rank.steps(1, 2)
    assert time.monotonic() - began < 1
    if acts is full_disk:
        wait_until(rank.warnings, "the problem")
    rank.finish(1.0)
    assert time.monotonic() - began < HANG_S
    (line,) = (one for one in capfd.readouterr().err.splitlines() if "is off" in one)
    assert line.startswith("TensorBoard is off: ") and reason in line
    (warning,) = rank.warnings()
    assert reason in warning


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    rank = Rank0(tmp_path, "mlflow")
    rank.finish()
    (warning,) = rank.warnings()
    assert "it cannot be imported" in warning and install("mlflow") in warning


def test_a_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never answers, and the key would be asked for on a terminal."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        rank = Rank0(tmp_path, "wandb")
        rank.steps(1)
        began = time.monotonic()
        rank.finish(1.0)
        assert time.monotonic() - began < HANG_S
        assert rank.warnings() == ["it did not finish within 1 s"]


def test_disabled_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logging = LoggingSection.model_validate({"trackers": ["wandb", "trackio"]})
    assert trackers_line(logging) == "logging to W&B (offline), trackio, project dmt"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [*wanted(logging)] == ["trackio"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_rows_are_in_the_order_of_steps(run: RunDirectory) -> None:
    """A skipped step between two logged ones comes between them; W&B takes no earlier one."""
    for number in (10, 20):
        jsonl.append(run.metrics, {"step": number, "loss": float(number)})
    jsonl.append(run.events, {"kind": "skip", "step": 15, "loss": 99.0, "why": "a spike"})
    jsonl.append(run.events, {"kind": "evaluation", "step": 20, "loss": 10.0})
    jsonl.append(run.events, {"kind": "evaluation", "step": [], "loss": 10.0})
    run.metrics.open("a").write('{"loss": 1}\n{"step": "x"}\n7\n{"step": 30')
    rows, posted = _Rows(run), Posted("id")
    assert [*rows.new(posted, newest=False)] == [
        (10, {"loss": 10.0}),
        (15, {"skip/loss": 99.0}),
    ]
    assert [*rows.new(posted, newest=False)] == []
    jsonl.append(run.events, {"kind": "save", "step": 20, "seconds": 1.0})
    last = {"loss": 20.0, "evaluation/loss": 10.0, "save/seconds": 1.0}
    assert [*rows.new(posted, newest=True)] == [(20, last)]
    posted.names["skip/loss"] = 15
    assert [*_Rows(run).new(posted, newest=True)] == [(20, last)]
    posted.names |= {"loss": 20, "save/seconds": 20}
    assert [*_Rows(run).new(posted, newest=True)] == [(20, {"evaluation/loss": 10.0})]


@pytest.mark.parametrize("damaged", ['{"run_id": 5, "posted_step": "x"}', "[]", "{"])
def test_a_damaged_state_is_none(run: RunDirectory, damaged: str) -> None:
    run.tracker_state("wandb").write_text(damaged)
    assert Posted.load(run.tracker_state("wandb")) is None
