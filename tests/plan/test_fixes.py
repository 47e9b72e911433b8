"""Doing what each error says ends at a recipe that can be planned, from any intent."""

import random
import re
from typing import Any

from tests.plan.families import GEMMA, LLAMA, MIXTRAL
from toolkit.errors import PlanError, Problem
from toolkit.intake.checks import broken_rules
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe

INTENTS = 50
MOST_FIXES = 25
"""Two fixes that undo each other would go on for ever."""

UNEVEN = LLAMA | {"num_hidden_layers": 7, "intermediate_size": 190}
DEGREES = ["auto", 1, 2, 3, 4, 6, 8, 16]
PLACES = ["none", "none", "cpu", "nvme"]
CHOICES: dict[str, list[Any]] = {
    "model.config": [LLAMA, MIXTRAL, GEMMA, UNEVEN],
    "training.sequence_length": [16, 63, 64, 66],
    "training.global_batch_size": [1, 2, 8, 12, 48, 50, 96],
    "training.micro_batch_size": ["auto", "auto", 1, 2, 3],
    "training.precision": ["fp32", "bf16", "fp16"],
    "parallel.engine": ["auto", "auto", "deepspeed", "megatron", "ddp", "fsdp"],
    "parallel.model": ["auto", "auto", "hf", "megatron"],
    "parallel.tensor": DEGREES,
    "parallel.pipeline": DEGREES,
    "parallel.virtual_pipeline": ["auto", "auto", 1, 2, 3],
    "parallel.expert": [1, 1, 1, 2, 3, 4, "auto"],
    "parallel.sequence": ["auto", "auto", True, False],
    "parallel.zero.stage": ["auto", "auto", 0, 1, 2, 3],
    "parallel.zero.offload_optimizer": PLACES,
    "parallel.zero.offload_parameters": PLACES,
    "parallel.recompute": ["auto", "none", "selective", "full"],
    "cluster.nodes": [1, 1, 2, 3],
    "cluster.gpus_per_node": [1, 2, 4, 6, 8],
    "cluster.gpu": ["cpu", "h100-80gb"],
}
SETTING = re.compile(r"((?:parallel|training)\.[a-z_.]+) to (\w+)")


def random_intent(source: random.Random) -> dict[str, Any]:
    intent: dict[str, Any] = {
        "name": "intent",
        "model": {},
        "data": {"train": {"kind": "text", "files": ["x"]}},
        "training": {"steps": 1},
        "optimizer": {"learning_rate": 1e-3},
    }
    for key, values in CHOICES.items():
        set_key(intent, key, source.choice(values))
    return intent


def set_key(intent: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        intent = intent.setdefault(section, {})
    intent[name] = value


def first_error(recipe: Recipe) -> Problem | None:
    """What `dmt check`, and then `dmt plan`, tells the user first."""
    for problem in broken_rules(recipe):
        return problem
    try:
        plan_recipe(recipe)
    except PlanError as error:
        key, _, found = error.message.partition(": ")
        return Problem(key, found, "", error.fix.replace("set it to", f"set {key} to"))
    return None


def follow(intent: dict[str, Any], problem: Problem) -> bool:
    """Do the first thing that the fix names; False where it names no setting."""
    if problem.fix.startswith("add `nvme_path:"):
        changes = [(problem.key, "/swap")]
    elif problem.fix.startswith("remove it"):
        changes = [(problem.key, None)]
    else:
        changes = SETTING.findall(re.split(", or | or ", problem.fix)[0])
    for key, value in changes:
        number = value.isdigit() if isinstance(value, str) else False
        set_key(intent, key, int(value) if number else {"true": True}.get(value, value))
    return bool(changes)


def dead_end(intent: dict[str, Any]) -> Problem | None:
    """The error at which a user who follows every first fix is stuck."""
    for _ in range(MOST_FIXES):
        problem = first_error(Recipe.model_validate(intent))
        if problem is None:
            return None
        if not follow(intent, problem):
            break
    return problem


def test_following_the_first_fix_reaches_a_plan() -> None:
    source = random.Random(20)
    ends = [dead_end(random_intent(source)) for _ in range(INTENTS)]
    assert not [str(problem) for problem in ends if problem is not None]
