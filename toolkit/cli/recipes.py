"""`dmt recipes`: the shipped recipes, a row for each size of model, the smallest first."""

import sys
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


def recipes() -> None:
    """List the shipped recipes: sizes of models, tasks, and the GPUs that each is made for.

    Example: `dmt recipes`, then `dmt plan llama-3.1-8b-lora`
    """
    sizes = {size: tasks for size, tasks in shipped_sizes().items() if not is_tiny(size)}
    rows = sorted((_row(size, tasks) for size, tasks in sizes.items()), key=lambda row: row[0])
    table = [["size", "parameters", *_TASKS], *(row for _, row in rows)]
    listed = {f"{size}-{task}" for size, tasks in sizes.items() for task in tasks}
    others = [name for name in shipped_recipes() if name not in listed]
    lines = [
        _WRAPPER.fill(f"for 2 processes of this machine: {', '.join(filter(is_tiny, others))}"),
        "",
        *columns(table, left=len(table[0])),
        "",
        _WRAPPER.fill(f"longer rows: {', '.join(one for one in others if not is_tiny(one))}"),
        "`dmt plan SIZE-TASK`; others: `dmt init SIZE --task TASK --cluster CLUSTER`",
    ]
    tell("\n".join(lines), sys.stdout)


def _row(size: str, tasks: dict[str, Path]) -> tuple[int, list[str]]:
    """The parameters of a size, and its line."""
    loaded = {task: load_recipe(file) for task, file in tasks.items()}
    first = next(iter(loaded.values()))
    parameters = model_spec(first.model.config or {}).parameters.total
    gpus = (
        f"{loaded[task].cluster.world_size} {loaded[task].cluster.gpu}"
        if task in tasks
        else "-"
        for task in _TASKS
    )
    return parameters, [size, human(parameters), *gpus]
