"""`dmt tune --search` of real runs: killed and started again, each trial is run once."""

import json
from pathlib import Path

import pytest

from tests.e2e.product import curve, dmt, events, run, started, steps_logged
from toolkit.intake.load import load_recipe

TRIALS, STEPS = 4, 16
RECIPE = f"""\
name: small
model:
  config: {{model_type: llama, vocab_size: 320, hidden_size: 32, intermediate_size: 64,
    num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
    max_position_embeddings: 64, tie_word_embeddings: true}}
data: {{train: {{kind: text, files: ["{{stdlib}}/json/*.py"]}}, validation_fraction: 0.2}}
training: {{steps: {STEPS}, sequence_length: 32, global_batch_size: 8, precision: fp32}}
optimizer: {{learning_rate: 3.0e-3}}
evaluation: {{every_steps: 4, batches: 1}}
parallel: {{engine: ddp}}
checkpoint: {{every_steps: 4, asynchronous: false, export: false}}
logging: {{every_steps: 1}}
"""
SPACE = "optimizer.learning_rate: {low: 1.0e-3, high: 1.0e-1, log: true}\n"


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    """Killed in the first trials and again once one has ended: none is lost or run twice."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "space.yaml").write_text(SPACE)
    folder = tmp_path / "runs/small-search"
    search = dmt("tune", "small.yaml", "--search", "space.yaml", "--trials", str(TRIALS))
    search += ["--parallel", "2"]

    def ended() -> list[int]:
        return [
            number
            for number in range(TRIALS)
            for one in events(folder / f"trials/{number:04d}", "end")
            if one["exit_code"] == 0
        ]

    with started(search, tmp_path) as command:
        command.wait_for(lambda: steps_logged(folder / "trials/0001") > 0, "two trials")
    with started(search, tmp_path) as command:
        command.wait_for(ended, "the end of a trial")
    answer = json.loads(run([*search, "--json"], tmp_path, code=0).out)
    trials = answer["trials"]
    assert [one["number"] for one in trials] == [*range(TRIALS)]
    done = [one["number"] for one in trials if one["ending"] == "done"]
    stopped = [one["number"] for one in trials if one["ending"] == "stopped"]
    assert sorted([*done, *stopped]) == [*range(TRIALS)] and done
    assert sorted(ended()) == done, "run once, each"
    for number in done:
        assert [*curve(folder / f"trials/{number:04d}")] == [*range(1, STEPS + 1)]
    best = min(done, key=lambda number: trials[number]["loss"])
    assert answer["best"]["number"] == best
    tuned = load_recipe(tmp_path / "small.tuned.yaml")
    rate = trials[best]["settings"]["optimizer.learning_rate"]
    assert tuned.optimizer.learning_rate == rate and tuned.name == "small"
