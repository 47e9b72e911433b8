"""`dmt recipes`: the shipped recipes, a row for each size of model, the smallest first."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import TextWrapper
from typing import get_args

from toolkit.cli.output import columns
from toolkit.intake.load import load_recipe
from toolkit.models.families import model_spec
from toolkit.recipe.places import shipped_recipes
from toolkit.starter.draft import Task, is_tiny, shipped_sizes
from toolkit.text.terminal import tell
from toolkit.text.units import human

_TASKS = get_args(Task)
_WRAPPER = TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False)
SPEEDS = Path(__file__).with_name("recipe_speeds.json")
"""The planner's tokens per second of each recipe, on all its GPUs. Written by
tests/cli/test_plan.py, as planning all recipes takes seconds."""


def recipes() -> None:
    """List the shipped recipes: sizes of models and tasks, each with the GPUs that it is made
    for and the tokens per second that the planner predicts on all of them.

    Example: `dmt recipes`, then `dmt plan llama-3.1-8b-lora`
    """
    sizes = {size: tasks for size, tasks in shipped_sizes().items() if not is_tiny(size)}
    speeds = json.loads(SPEEDS.read_text(encoding="utf-8"))
    found = (_row(size, tasks, speeds) for size, tasks in sizes.items())
    rows = sorted(found, key=lambda row: row[0])
    table = [["size", "params", *_TASKS], *(row for _, row in rows)]
    listed = {f"{size}-{task}" for size, tasks in sizes.items() for task in tasks}
    others = [name for name in shipped_recipes() if name not in listed]
    lines = [
        _WRAPPER.fill(f"for 2 processes of this machine: {', '.join(filter(is_tiny, others))}"),
        "",
        *columns(table, left=len(table[0])),
        "",
        "GPUs, and the tokens per second that the planner predicts on all of them",
        _WRAPPER.fill(f"longer rows: {', '.join(one for one in others if not is_tiny(one))}"),
        "`dmt plan SIZE-TASK`; others: `dmt init SIZE --task TASK --cluster CLUSTER`",
    ]
    tell("\n".join(lines), sys.stdout)


def _row(
    size: str, tasks: Mapping[str, Path], speeds: Mapping[str, float]
) -> tuple[int, list[str]]:
    """Return the parameters of a size, and its line."""
    loaded = {task: load_recipe(file) for task, file in tasks.items()}
    first = next(iter(loaded.values()))
    parameters = model_spec(first.model.config or {}).parameters.total
    cells = ["-"] * len(_TASKS)
    for task, recipe in loaded.items():
        gpu = recipe.cluster.gpu.partition("-")[0]
        cell = [str(recipe.cluster.world_size), gpu]
        if (speed := speeds.get(f"{size}-{task}")) is not None:
            cell.append(human(speed))
        cells[_TASKS.index(task)] = " ".join(cell)
    return parameters, [size, human(parameters), *cells]
