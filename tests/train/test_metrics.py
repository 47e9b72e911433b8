"""metrics.jsonl and events.jsonl: every line readable, each step once, no secret."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.disks import make_room, small_file_system
from toolkit.run import jsonl
from toolkit.run.events import EventLog
from toolkit.run.metrics import Metrics, MetricsLog, mfu

LINE = Metrics(
    step=1,
    loss=5.5,
    grad_norm=1.25,
    lr=3e-4,
    tokens=1024,
    tokens_per_s=2048.0,
    step_time_s=0.5,
    data_wait_s=0.125,
    mfu=None,
    consumed_samples=8,
    consumed_tokens=1024,
    skipped=False,
    memory_gib=None,
)
CONTRACT = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s"),
    *("data_wait_s", "mfu"),
    *("consumed_samples", "consumed_tokens", "skipped", "memory_gib"),
]


@pytest.fixture
def events(tmp_path):
    return EventLog(tmp_path / "events.jsonl")


def strict(text: str) -> object:
    """Parse as a standard parser does: Python's own would take NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def steps(path: Path) -> list[int]:
    return [record["step"] for record in jsonl.read(path)]


def test_the_contract_of_metrics_jsonl(tmp_path, events):
    log = MetricsLog.resume(tmp_path / "metrics.jsonl", 0, events)
    log.write(LINE)
    assert [field.name for field in fields(Metrics)] == [*CONTRACT, "metrics"]
    (line,) = log.path.read_text().splitlines()
    assert list(strict(line)) == CONTRACT
    assert strict(line)["mfu"] is None
    assert not events.path.exists(), "a fresh run resumes nothing"


def test_metrics_of_an_objective_stand_next_to_the_others(tmp_path, events):
    log = MetricsLog.resume(tmp_path / "metrics.jsonl", 0, events)
    log.write(replace(LINE, metrics={"accuracy": 0.5, "loss": 1.0}))
    record = strict(log.path.read_text())
    assert list(record) == [*CONTRACT, "accuracy"]
    assert record["accuracy"] == 0.5
    assert record["loss"] == LINE.loss, "a name of DMT's own takes precedence"


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_non_finite_numbers_are_valid_json(tmp_path, events, value, text):
    log = MetricsLog.resume(tmp_path / "metrics.jsonl", 0, events)
    log.write(replace(LINE, loss=value))
    record = strict(log.path.read_text())
    assert record["loss"] == text
    assert str(float(record["loss"])) == str(value)


def test_resume_drops_the_steps_that_are_done_again(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog.resume(path, 0, events)
    for step in (10, 20, 30, 40):
        log.write(replace(LINE, step=step))
    log = MetricsLog.resume(path, 20, events)
    assert steps(path) == [10, 20]
    log.write(replace(LINE, step=30))
    assert steps(path) == [10, 20, 30]
    resume, replay = jsonl.read(events.path)
    assert (resume["kind"], resume["step"], resume["dropped_metrics_lines"]) == (
        "resume",
        20,
        2,
    )
    assert (replay["from_step"], replay["to_step"], replay["seconds"]) == (20, 40, 10.0)


def test_a_restart_from_nothing_says_so(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    MetricsLog.resume(path, 0, events).write(LINE)
    MetricsLog.resume(path, 0, events)
    assert path.read_text() == ""
    event, _ = jsonl.read(events.path)
    assert (event["kind"], event["step"]) == ("resume", 0)


def test_a_kill_at_any_byte_is_mended(tmp_path, events):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog.resume(path, 0, events)
    log.write(LINE)
    log.write(replace(LINE, step=2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole) - 1, 7):  # without its newline alone, it is whole
        path.write_bytes(whole[:size])
        MetricsLog.resume(path, 2, events).write(replace(LINE, step=3))
        lines = path.read_text().splitlines()
        assert [strict(line)["step"] for line in lines] == [1, 3]


def test_a_torn_event_is_ended(events):
    events.write("start")
    with events.path.open("a") as file:
        file.write('{"time": "2031')
    EventLog(events.path).write("save", step=3)
    assert [event["kind"] for event in jsonl.read(events.path)] == ["start", "save"]


_WRITE_MANY = """
import sys
from pathlib import Path
from toolkit.run.events import EventLog
from toolkit.system.atomic import write_atomically
log = EventLog(Path(sys.argv[1]))
for number in range(200):
    EventLog(log.path).write("warning", writer=int(sys.argv[2]), number=number, pad="x" * 500)
"""


def test_several_processes_do_not_tear_each_others_lines(events):
    events.write("start")
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITE_MANY, str(events.path), str(writer)])
        for writer in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    # A writer that sees a half of another's line ends it: an empty line, which readers skip.
    lines = filter(None, events.path.read_text().splitlines())
    records = [strict(line) for line in lines]
    assert len(records) == 601
    for writer in range(3):
        numbers = [r["number"] for r in records if r.get("writer") == writer]
        assert numbers == list(range(200))


def test_mfu_against_a_published_run():
    # PaLM 540B (arXiv:2204.02311, table 3 and appendix B): 238.3 k tokens/s on 6144 TPU v4
    # of 275 TFLOP/s; 6·540.35e9 FLOPs per token without attention gives 45.7 %.
    assert mfu(6 * 540.35e9, 238.3e3, 275e12, 6144) == pytest.approx(0.457, abs=1e-3)


def test_a_full_disk_costs_lines_and_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    with small_file_system(tmp_path / "disk", 4096) as disk:
        log = MetricsLog(disk / "metrics.jsonl")
        for step in range(1, 41):
            log.write(replace(LINE, step=step))
        assert log.path.read_text().endswith("\n"), "no part of a line is left"
        fitted = steps(log.path)
        assert fitted == list(range(1, len(fitted) + 1))
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith(f"warning: {log.path} could not be written, lines will be ")
        make_room(disk, 16384)
        log.write(replace(LINE, step=41))
        log.write(replace(LINE, step=42))
        lines = [strict(line)["step"] for line in log.path.read_text().splitlines()]
        assert lines == [*fitted, 41, 42]
        assert capsys.readouterr().err == ""
