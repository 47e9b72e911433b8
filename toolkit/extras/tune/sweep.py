"""A search driven by a W&B sweep: its file, and one trial of its agent.

`wandb sweep FILE` and `wandb agent ID` run `dmt tune RECIPE --agent KEY=VALUE …` per trial.
"""

import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from toolkit.errors import PlanError
from toolkit.extras.tune.search import REDUCTION, SearchRequest, first_rung, validates
from toolkit.extras.tune.space import Choices, Number, Parameter, Range
from toolkit.intake.load import load_recipe
from toolkit.launchers.launching import Origin, launch_recipe
from toolkit.recipe.dump import dump
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.track.follower import PostedState

ONLINE = "logging.wandb.mode=online"


def write_sweep(request: SearchRequest, path: Path) -> None:
    """Write what `wandb sweep` reads. Raises PlanError if the file exists."""
    if path.exists():
        raise PlanError(f"--sweep: {path} exists", fix="name another file, or remove it")
    recipe = load_recipe(request.recipe, request.overrides)
    stated = [word for one in request.overrides for word in ("--set", one)]
    command = ["dmt", "tune", str(request.recipe), "--agent", "--dir", str(request.folder)]
    data: dict[str, Any] = {
        "method": "bayes",
        "run_cap": request.trials,
        "metric": {"name": "evaluation/loss" if validates(recipe) else "loss",
                   "goal": "minimize"},
        "parameters": {one.key: _distribution(one) for one in request.space.parameters},
        "command": [*command, *stated, "${args_no_hyphens}"],
    }  # fmt: skip
    rung = first_rung(recipe, request.space)
    section = recipe.evaluation if validates(recipe) else recipe.logging
    if request.prune and rung is not None and section.every_steps:
        # W&B counts the times that the metric was logged, not steps.
        data["early_terminate"] = {
            "type": "hyperband", "min_iter": rung // section.every_steps, "eta": REDUCTION,
        }  # fmt: skip
    write_atomically(path, dump(data, flow=False))


def _distribution(one: Parameter) -> dict[str, Any]:
    if isinstance(one, Choices):
        return {"values": list(one.values)}  # texts: the agent writes others as Python does
    found = {"min": one.low, "max": one.high}
    if one.step is not None and not (one.whole and one.step == 1):
        return {"values": _stepped(one)}  # W&B counts the steps of a q_uniform from 0
    kind = "log_uniform_values" if one.log else "uniform"
    if not one.whole:
        return {"distribution": kind, **found}
    if one.log:
        return {"distribution": f"q_{kind}", **found, "q": 1}
    return {"distribution": "int_uniform", **found}


def _stepped(one: Range) -> list[Number]:
    """Each number of a range with a step."""
    low, high, step = (Decimal(str(number)) for number in (one.low, one.high, one.step))
    kind = int if one.whole else float
    return [kind(low + count * step) for count in range(int((high - low) / step) + 1)]


def run_agent_trial(
    recipe: Path, overrides: Sequence[str], chosen: Sequence[str], folder: Path
) -> int:
    """Run the trial that a W&B agent asks for, as the agent's own W&B run; its exit code.

    Raises PlanError where no agent started it.
    """
    run_id = os.environ.get("WANDB_RUN_ID")
    if not run_id or not run_id.isalnum():
        raise PlanError(
            "--agent: started by no W&B agent (WANDB_RUN_ID is not set)",
            fix="wandb sweep FILE, with the file of --sweep, then wandb agent ID",
        )
    # A rounded number of W&B's is a float, which no setting for integers takes.
    texts = [*overrides, *(re.sub(r"=(\d+)\.0$", r"=\1", one) for one in chosen), ONLINE]
    run = RunDirectory(folder / "trials" / run_id)
    run.path.mkdir(parents=True, exist_ok=True)
    state = run.path / "wandb.json"
    if not state.exists():
        PostedState(run_id).save(state)
    origin = Origin(recipe, texts)
    loaded = load_recipe(recipe, texts)
    return launch_recipe(loaded, run.path, check=False, origin=origin).exit_code
