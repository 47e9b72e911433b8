"""W&B with the real package, offline or against this machine: training never notices."""

import http.server
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from wandb.proto import wandb_internal_pb2

from tests.processes import HANG_S, wait_until
from toolkit.plan.cost.prediction import Prediction
from toolkit.recipe.schema import LoggingSection, WandbSection
from toolkit.run import jsonl
from toolkit.run.comparison import RunMeasurement, event_fields
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.track.metrics import Metrics, MetricsLog
from toolkit.track.service import TrackerFollower
from toolkit.track.trackers import wanted

pytestmark = pytest.mark.slow

OFFLINE = WandbSection(project="tests", tags=("a", "b"))
ONLINE = WandbSection(project="tests", mode="online")
CANARY = "canary-7d1f2c9b"
ANSWER_S = 60.0
"""When the server that never answers hangs up."""


class Trainer:
    """What rank 0 does: metrics, events, and a follower."""

    def __init__(self, path: Path, resume: int = 0, section: WandbSection = OFFLINE) -> None:
        self.run = RunDirectory(path)
        self.run.logs.mkdir(exist_ok=True)
        self.events = EventLog(self.run.events)
        self.metrics = MetricsLog.resume(self.run.metrics, resume, self.events)
        settings = section.model_dump()
        self.follower = TrackerFollower(self.run, "wandb", settings, "a run", self.events)

    def step(self, step: int, loss: float = 1.0) -> None:
        self.metrics.write(
            Metrics(
                *(step, loss, 1.0, 1e-3, 64, 100.0, 0.1, 0.0, None),
                *(8 * step, 64 * step, False, None),
            )
        )

    def problem(self) -> str:
        """The one that comes."""
        found: list[str | None] = []

        def has_come() -> bool:
            found.append(self.follower.problem())
            return found[-1] is not None

        wait_until(has_come, "a problem")
        return str(found[-1])

    def finish(self, timeout_s: float = HANG_S) -> str | None:
        self.events.write("end", exit_code=0)
        return self.follower.finish(timeout_s)

    def warnings(self) -> list[str]:
        return [e["message"] for e in jsonl.read(self.run.events) if e["kind"] == "warning"]


def stored_blobs(data: bytes) -> Iterator[bytes]:
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


def offline_records(run: RunDirectory) -> list[wandb_internal_pb2.Record]:
    """Read what W&B would upload, in the order of its directories."""
    records = []
    for file in sorted(run.wandb.glob("offline-run-*/*.wandb")):
        for blob in stored_blobs(file.read_bytes()):
            records.append(wandb_internal_pb2.Record.FromString(blob))
    return records


def history(records: list[wandb_internal_pb2.Record]) -> list[dict[str, object]]:
    return [
        {
            (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path_factory):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    home = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("NETRC", f"{home}/netrc")


def test_offline_run_and_its_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", CANARY + "0" * 24)
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    (tmp_path / "recipe.yaml").write_text("name: a\noptimizer: {learning_rate: 0.5}\n")
    (tmp_path / "plan.json").write_text('{"engine": "ddp"}')
    first = Trainer(tmp_path)
    for step in (1, 2, 3, 4):
        first.step(step, loss=float("nan") if step == 3 else step)
    first.events.write("evaluation", step=4, loss=0.25)
    assert first.finish() is None
    # Stopped behind the checkpoint of step 2: steps 3 and 4 are done again.
    second = Trainer(tmp_path, resume=2)
    for step in (3, 4, 5):
        second.step(step, loss=step)
    second.events.write("evaluation", step=5, loss=0.125)
    assert second.finish() is None

    sync = second.follower.afterwards()
    assert sync is not None and "all 2 starts of the run" in sync
    command = shlex.split(sync.partition(": ")[2])
    assert command == ["wandb", "sync", str(tmp_path / "wandb")]
    argv = [sys.executable, "-m", *command, "--dry-run"]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
    assert "Would sync 2 run(s)" in told.stdout + told.stderr

    records = offline_records(second.run)
    rows = history(records)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5], "no step is posted twice"
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5], "W&B's own count does not restart"
    assert [row.get("evaluation/loss") for row in rows] == [None, None, None, 0.25, 0.125]
    assert [row["consumed_tokens"] for row in rows] == [64, 128, 192, 256, 320]
    assert str(rows[2]["loss"]) in ("nan", "NaN")
    assert "mfu" not in rows[0]
    assert len({r.run.run_id for r in records if r.HasField("run")}) == 1, "one id"
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert ("*", "step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
    config = {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update}
    assert config["recipe"] == {"name": "a", "optimizer": {"learning_rate": 0.5}}
    assert config["plan"] == {"engine": "ddp"}
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file
        if file.suffix == ".wandb":
            assert sys.executable.encode() not in file.read_bytes()
    environments = [r.environment for r in records if r.HasField("environment")]
    assert not any(e.host or e.args or e.program or e.executable for e in environments)
    uploaded = {file.name for file in tmp_path.glob("wandb/*/files/*") if file.is_file()}
    assert not uploaded & {"wandb-metadata.json", "requirements.txt", "output.log"}


def test_prediction_is_in_the_summary(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.step(1)
    fields = event_fields(
        Prediction(2.0, 60.0, "data sheet"), RunMeasurement(2.5, 1, 63.0, None)
    )
    trainer.events.write("prediction", step=1, **fields)
    assert trainer.finish() is None
    summary = {
        (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
        for record in offline_records(trainer.run)
        for item in record.summary.update
    }
    assert summary["predicted/step_time_s"] == 2.0
    assert summary["measured/step_time_s"] == 2.5
    assert summary["measured_over_predicted/memory"] == 1.05
    assert summary["predicted/basis"] == "data sheet"


def test_points_are_posted_while_the_run_goes_on(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.step(1)
    state = trainer.run.tracker_state("wandb")
    wait_until(
        lambda: state.exists() and json.loads(state.read_text())["posted_step"] == 1, "a point"
    )
    assert trainer.finish() is None


def test_missing_package(tmp_path, monkeypatch):
    shadow = tmp_path / "shadow" / "wandb"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(shadow.parent))
    trainer = Trainer(tmp_path)
    problem = trainer.problem()
    assert "pip install wandb" in problem
    assert "Training is not affected" in problem
    trainer.step(1)
    assert trainer.follower.problem() is None, "told once"
    assert trainer.finish() is None
    assert len(trainer.warnings()) == 1


def test_folder_that_cannot_be_written(tmp_path):
    # A file in its place: permissions would not stop root.
    (tmp_path / "wandb").write_text("")
    trainer = Trainer(tmp_path)
    trainer.step(1)
    assert "cannot be written" in trainer.finish()
    assert len(trainer.warnings()) == 1


def test_folder_removed_in_the_middle(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.step(1)
    wait_until(lambda: list(tmp_path.glob("wandb/offline-run-*/files")), "W&B's folder")
    shutil.rmtree(tmp_path / "wandb", ignore_errors=True)
    trainer.step(2)
    assert "was removed" in trainer.problem()
    trainer.step(3)
    assert trainer.finish() is None
    assert len(trainer.warnings()) == 1


class _Server:
    """A W&B server on this machine that refuses every key, or never answers."""

    def __init__(self, *, answers: bool) -> None:
        gate = self._gate = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if not answers:
                    gate.wait(ANSWER_S)
                    return
                self.send_response(401)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815 - the base class's name

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self._gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server(request, monkeypatch):
    server = _Server(answers=request.param)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    yield server
    server.close()


@pytest.mark.parametrize("server", [True], indirect=True)
@pytest.mark.usefixtures("server")
def test_bad_key(tmp_path):
    trainer = Trainer(tmp_path, section=ONLINE)
    trainer.step(1)
    assert "W&B is off" in trainer.problem()
    assert trainer.finish() is None
    assert len(trainer.warnings()) == 1
    assert "0123456789" * 4 not in (tmp_path / "logs" / "wandb.log").read_text()


def test_no_key(tmp_path):
    trainer = Trainer(tmp_path, section=ONLINE)
    assert "W&B is off" in trainer.problem()
    trainer.finish()


@pytest.mark.parametrize("server", [False], indirect=True)
@pytest.mark.usefixtures("server")
def test_server_that_never_answers(tmp_path):
    of_others = psutil.Process().children(recursive=True)
    trainer = Trainer(tmp_path, section=ONLINE)
    trainer.step(1)

    def started_here():
        now = psutil.Process().children(recursive=True)
        return [process for process in now if process not in of_others]

    wait_until(lambda: len(started_here()) > 1, "the follower and wandb-core")
    children = started_here()
    started = time.monotonic()
    assert "did not finish within 1 s" in trainer.finish(1.0)
    assert time.monotonic() - started < ANSWER_S
    assert len(trainer.warnings()) == 1
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive, "wandb-core ends with the follower"


_KILLED_TRAINER = """
import os, sys, time
from pathlib import Path
from tests.train.test_wandb import Trainer
trainer = Trainer(Path(sys.argv[1]))
trainer.step(1)
child = os.fork()
if child:
    print(trainer.follower._process.pid, child, flush=True)
time.sleep(60)  # The child holds the follower's pipe open, as a data loader's worker would.
"""


def test_a_killed_trainer_leaves_no_follower(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", _KILLED_TRAINER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    follower, child = map(psutil.Process, map(int, trainer.stdout.readline().split()))
    try:
        trainer.kill()
        trainer.wait()
        psutil.wait_procs([follower], timeout=HANG_S)
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
        assert [row["step"] for row in history(offline_records(RunDirectory(tmp_path)))] == [1]
    finally:
        child.kill()
        trainer.stdout.close()


def test_disabled_starts_nothing():
    assert [*wanted(LoggingSection(wandb=WandbSection(mode="disabled")))] == []
