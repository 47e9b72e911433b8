"""Tasks of the lm-evaluation-harness: what a recipe states of them."""

from typing import Annotated

from pydantic import Field

from toolkit.evaluator import Evaluator, EvaluatorSection
from toolkit.recipe.section import Auto, Count, NonEmpty, Positive


class TasksSection(EvaluatorSection):
    """Tasks of the lm-evaluation-harness, on the exported weights (docs/evaluation.md)."""

    names: Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]
    """Tasks, groups or tags, as `lm_eval ls tasks` prints them, or those of `include_path`."""
    include_path: NonEmpty | None = None
    """Folder with YAML files of your own tasks, relative to the recipe's file."""
    limit: Positive | None = None
    """Examples of each task, the first ones; null for all."""
    few_shot: Count | None = None
    """Solved examples in each prompt; null: what each task states."""
    batch: Positive | Auto = 8
    """Examples that are computed at once; `auto`: the most that fit."""
    chat: bool = False
    """Ask in turns of the tokenizer's chat template."""


TASKS = Evaluator(
    "tasks",
    TasksSection,
    evaluate="toolkit.evaluate.harness:evaluate",
    prepare="toolkit.evaluate.harness:prepare",
    event="evaluation_tasks",
    extra="eval",
    packages={"lm-eval": "lm_eval"},
)
