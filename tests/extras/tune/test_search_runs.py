"""`dmt tune --search` of real runs: killed and started again, each trial is run once."""

import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.product import curve, dmt, events, run, started, steps_logged
from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.recipe import yaml_text

STEPS = 16
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


@pytest.mark.parametrize(
    "trials",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.soak)],
)
def test_killed_twice_at_random(trials: int, tmp_path: Path) -> None:
    """Started again each time: no trial is lost or run twice."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "space.yaml").write_text(SPACE)
    folder = tmp_path / "runs/small-search"

    def folders() -> dict[int, Path]:
        return {int(one.name): one for one in sorted((folder / "trials").glob("*"))}

    search = dmt("tune", "small.yaml", "--search", "space.yaml", "--trials", str(trials))

    def steps() -> int:
        return sum(map(steps_logged, folders().values()))

    def ended() -> list[int]:
        return [
            number
            for number, run_dir in folders().items()
            for one in events(run_dir, "end")
            if one["exit_code"] == 0
        ]

    # A trial that is stopped early has done a quarter of its steps.
    first, second = sorted(random.Random(trials).sample(range(trials * STEPS // 4), 2))
    with started(search, tmp_path) as command:
        command.wait_for(lambda: steps() > first, f"{first} steps")
    with started(search, tmp_path) as command:
        command.wait_for(lambda: steps() > second, f"{second} steps")
        os.kill(command.process.pid, signal.SIGKILL)  # the command only: its ranks save
        answer = json.loads(run([*search, "--json"], tmp_path, code=0).out)
        command.end(-signal.SIGKILL)
    found = {one["number"]: one for one in answer["trials"]}
    assert len(found) == trials and sorted(found) == [*folders()]
    done = sorted(number for number, one in found.items() if one["ending"] == "done")
    assert {one["ending"] for one in found.values()} <= {"done", "stopped"} and done
    assert [number for number in ended() if number in done] == done, "run once, each"
    for number in done:
        assert [*curve(folders()[number])] == [*range(1, STEPS + 1)]
    best = min(done, key=lambda number: found[number]["loss"])
    assert answer["best"]["number"] == best
    tuned = load_recipe(tmp_path / "small.tuned.yaml")
    rate = found[best]["settings"]["optimizer.learning_rate"]
    assert tuned.optimizer.learning_rate == rate and tuned.name == "small"


@pytest.mark.slow
def test_the_sweep_of_the_page(tmp_path: Path) -> None:
    """What W&B's agent makes of docs/tuning.md trains as the agent's own run."""
    from wandb.sdk.launch.sweeps import utils

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    page = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(method: bayes.*?)```", page, re.DOTALL)
    stated, problems = yaml_text.parse(block, "sweep.yaml")
    assert not problems
    sweep = stated.data
    args = {"optimizer.learning_rate": 0.02, "optimizer.betas": "[0.9, 0.99]"}
    job = {"args": {key: {"value": value} for key, value in args.items()}}
    known = utils.create_sweep_command_args(job)
    command = utils.create_sweep_command(sweep["command"])
    words = [*command[:-1], *known["args_no_hyphens"]]
    stand_in = tmp_path / "bin/dmt"  # keeps its words, which are those of a warm command
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\n')
    stand_in.chmod(0o755)
    agent = {"WANDB_RUN_ID": "ab12cd34"}
    path = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    subprocess.run(words, cwd=tmp_path, env=os.environ | agent | path, check=True)
    verb, *arguments = (tmp_path / "words").read_text().splitlines()
    run(dmt(verb, *arguments), tmp_path, agent, code=0)
    trial = tmp_path / "runs/ab12cd34"
    assert steps_logged(trial) == STEPS
    assert json.loads((trial / "wandb.json").read_text())["run_id"] == "ab12cd34"
    assert load_recipe(trial / "recipe.yaml").optimizer.betas == (0.9, 0.99)
