"""Which rows a follower gives to a tracker, in which order, whatever is written meanwhile."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.track import follower
from toolkit.track.follower import PostedState, Poster
from toolkit.track.trackers.base import Rows, TrackedRun, Tracker


class Remembering(Tracker):
    """Keeps the rows, and what was noted of them on disk when they came."""

    def __init__(self, state_file: Path) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.noted: list[int] = []
        self._state_file = state_file

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        raise NotImplementedError

    def log(self, rows: Rows) -> None:
        self.rows += [(step, dict(row)) for step, row in rows.items()]
        self.noted.append(PostedState.load(self._state_file).posted_step)

    def finish(self, exit_code: int) -> None:
        raise NotImplementedError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def step(run: RunDirectory, number: int) -> None:
    jsonl.append(run.metrics, {"step": number, "loss": float(number)})


def evaluation(run: RunDirectory, number: int) -> None:
    jsonl.append(run.events, {"kind": "evaluation", "step": number, "loss": number / 2})


def poster(
    run: RunDirectory, state: PostedState, stored: Mapping[str, int] | None = None
) -> tuple[Poster, Remembering]:
    file = run.path / "state.json"
    tracker = Remembering(file)
    return Poster(run, tracker, stored, state, file), tracker


@pytest.mark.parametrize("stored", [None, {}])
def test_rows_are_in_the_order_of_steps(
    run: RunDirectory, stored: Mapping[str, int] | None
) -> None:
    """A skipped step between two logged ones comes between them."""
    for number in (10, 20):
        step(run, number)
    jsonl.append(run.events, {"kind": "skip", "step": 15, "loss": 99.0, "why": "a spike"})
    evaluation(run, 20)
    one, tracker = poster(run, PostedState("id"), stored)
    one.post_new()
    one.post_new()
    assert tracker.rows == [
        (10, {"loss": 10.0}),
        (15, {"skip/loss": 99.0}),
        (20, {"loss": 20.0, "evaluation/loss": 10.0}),
    ]


def test_an_event_and_the_next_step_come_while_files_are_read(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event belongs to the row before: a store that takes no earlier steps must get it."""
    step(run, 10)
    read, calls = follower._new_lines, []

    def slow(path: Path, *more: Any) -> tuple[list[dict[str, object]], int]:
        found = read(path, *more)
        calls.append(path)
        if len(calls) == 1:
            evaluation(run, 10)
            step(run, 20)
        return found

    monkeypatch.setattr(follower, "_new_lines", slow)
    one, tracker = poster(run, PostedState("id"))
    one.post_new()
    one.post_new()
    assert tracker.rows == [(10, {"loss": 10.0, "evaluation/loss": 5.0}), (20, {"loss": 20.0})]


def test_damaged_lines_and_states_are_left_out(run: RunDirectory) -> None:
    run.metrics.write_text('{"loss": 1}\n{"step": "x", "loss": 1}\n7\n')
    run.events.write_text('{"step": 4}\n{"kind": "evaluation", "step": [], "loss": 1}\n')
    step(run, 5)
    state = run.path / "state.json"
    for damaged in ('{"run_id": 5, "posted_step": "x"}', "[]", '{"run_id": {}}'):
        state.write_text(damaged)
        one, tracker = poster(run, PostedState.load(state))
        one.post_new()
        assert tracker.rows == [(5, {"loss": 5.0})]


def test_what_is_posted_is_noted_before(run: RunDirectory) -> None:
    """So that a kill between the two loses a row there, and shows none twice."""
    one, tracker = poster(run, PostedState("id"))
    step(run, 10)
    one.post_new()
    evaluation(run, 10)
    step(run, 20)
    evaluation(run, 20)
    one.post_new()
    assert tracker.noted == [10, 20]
    assert tracker.rows[-1] == (20, {"loss": 20.0, "evaluation/loss": 10.0})
    again, later = poster(run, PostedState.load(run.path / "state.json"))
    again.post_new()
    step(run, 30)
    again.post_new()
    assert later.rows == [(30, {"loss": 30.0})]


def test_what_a_store_has_is_not_posted_again(run: RunDirectory) -> None:
    """Of every name by itself: a kill may have come between two of them."""
    for number in (10, 20):
        step(run, number)
        evaluation(run, number)
    one, tracker = poster(run, PostedState("id"), {"loss": 20, "evaluation/loss": 10})
    one.post_new()
    assert tracker.rows == [(20, {"evaluation/loss": 10.0})]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ({"kind": "end", "exit_code": 0}, 0),
        ({"kind": "end", "exit_code": 75}, 75),
        ({"kind": "save", "step": 10}, 1),
    ],
)
def test_how_the_run_ended(run: RunDirectory, last: Mapping[str, object], code: int) -> None:
    """Killed runs leave no `end`."""
    jsonl.append(run.events, {"kind": "start", "step": 0})
    jsonl.append(run.events, last)
    assert follower._exit_code(run.events) == code
