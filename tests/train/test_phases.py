"""The phases of a start: one account for people, for events.jsonl and for the time limits."""

import io
import re
from contextlib import closing

import pytest
import torch
from rich.console import Console

from tests.processes import wait_until
from toolkit.checkpoint.shards import whole_block
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import ModelSection
from toolkit.train import watchdog as module
from toolkit.train.watchdog import BUILDING, CountedWeights, Marks

CURSOR = re.compile(r"\x1b\[\?25([hl])")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def printed(phases: Marks) -> str:
    assert isinstance(phases.console.file, io.StringIO)
    return phases.console.file.getvalue()


def test_a_log_file_has_a_line_for_a_phase_that_lasts(monkeypatch):
    phases = Marks(0, Console(file=io.StringIO()))
    monkeypatch.setattr(module, "NOTICEABLE_S", 3600)
    with closing(phases), phases:
        phases.begin("reading the data")
        monkeypatch.setattr(module, "NOTICEABLE_S", 0)
        phases.begin("tokenising", 40)(1)
        wait_until(lambda: "\n" in printed(phases), "a line")
    assert printed(phases) == "tokenising\n", "while it goes on, and not what was quick"


def test_a_terminal_has_a_bar_where_there_is_a_total_and_nothing_is_left():
    phases = Marks(0, terminal())
    with closing(phases), phases:
        phases.begin("reading the data")
        phases.begin("hashing [red]\x1b[8m.bin", 8)(2)
        wait_until(lambda: "25%" in printed(phases), "a quarter")
        assert CURSOR.findall(printed(phases))[-1] == "h", "a killed rank hides no cursor"
    shown = printed(phases)
    assert "reading the data" in shown
    assert r"hashing [red]\x1b[8m.bin" in shown, "as it stands, escaped"
    assert shown.endswith("\x1b[1A\x1b[2K"), "the line is taken back"


def test_what_is_done_of_a_phase_restarts_the_time_limit():
    for rank in (0, 1):
        marks = Marks(rank, Console(file=io.StringIO()))
        tick = marks.begin("exporting", 100)
        marks._idle_s, count = 5.0, marks._count
        tick(10)
        assert (marks._idle_s, marks._count) == (0.0, count), "shown or not, on every rank"
        assert printed(marks) == ""


@pytest.mark.parametrize("by", ["parameters", "checkpoint tensors"])
def test_weights_are_counted_while_a_model_is_filled(by):
    """transformers' models are filled by their parameters, megatron-core's by rectangles."""
    config = {"model_type": "mixtral", "vocab_size": 32, "hidden_size": 8}
    config |= {"num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
    section = ModelSection.model_validate({"config": {**config, "num_local_experts": 4}})
    built = hf.build_config(section)
    begun: list[tuple[str, int | None]] = []
    done: list[int] = []

    class Recorded(Marks):
        def begin(self, doing, total=None):
            begun.append((doing, total))
            return done.append

    source = hf.weight_source(section, built, 1)
    weights = CountedWeights(source, "drawing the weights", Layout(), Recorded(0))
    if by == "parameters":
        names = hf.parameter_shapes(built)
        hf.fill(hf.empty_model(built, torch.device("cpu")), weights)
    else:
        names = hf.checkpoint_shapes(built)
        for name, shape in names.items():
            weights.read_block(whole_block(name, shape))
    assert begun == [("drawing the weights", len(names)), (BUILDING, None)]
    assert done == [1] * len(names)
