"""The file that `accelerate launch --config_file` takes, from a recipe and its plan.

One file is complete. Engine-specific parts are in `Backend.accelerate`. The keys are those of
accelerate's commands/config/config_args.py and commands/launch.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from toolkit.backend import BACKENDS, InAccelerate
from toolkit.errors import PlanError
from toolkit.plan.dimensions import DEGREES, degrees_text, recompute_text
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import ClusterSection, Recipe
from toolkit.recipe.words import settings
from toolkit.system.interpreter import TRAIN

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's word for a recipe's precision."""

PORT = 29500
"""PyTorch's and Accelerate's usual port, on which several machines meet."""

ASK_FOR_RANK = "give --machine_rank N on the command line, 0 on the first machine"
"""Stands in the file of several machines: Accelerate's default would be 0 on each of them, and
they would wait for each other. As it is no number, Accelerate stops and quotes it."""

ASK_FOR_IP = "give --main_process_ip on the command line"

_IN_SCRIPTS = {"loss": "whole", "compile": "none"}
"""What transformers models do by themselves, of `kernels`, and planning must know."""
_ASKED_FOR = {"parallel.replicate": 1, "parallel.context": 1}
"""What is on where the recipe says so, and the value otherwise."""


def render(recipe: Recipe, plan: Plan) -> str:
    """The YAML text for a recipe on its cluster.

    Raises PlanError where the plan's model is megatron-core's, RecipeError where the
    recipe's own DeepSpeed file disagrees with the recipe.
    """
    words = in_accelerate(recipe, plan)
    precision = MIXED_PRECISION[recipe.training.precision]
    config = BACKENDS[plan.engine].render(recipe, plan.layout)
    body = words.section(plan.layout, precision, config)
    heading = [*_heading(recipe, words)]
    if '"auto"' in body:
        layout = plan.layout
        heading += (
            'What is "auto" is stated by the script: in TrainingArguments, or its DataLoader',
            "and Accelerator(gradient_accumulation_steps=…). "
            f"The recipe has a batch of {layout.micro_batch} per device,",
            f"{layout.gradient_accumulation} accumulation steps, and clips at "
            f"{recipe.optimizer.clip_grad_norm or 0.0}.",
        )
    start = dump(dict(_start(words, recipe.cluster)), flow=False)
    return "".join(f"# {line}\n" for line in heading) + start + body


def refuse_kernels(recipe: Recipe) -> None:
    """Raises PlanError where a recipe states what the model of a script would not do."""
    if stated := _beyond_scripts(recipe):
        raise PlanError(
            f"{recipe.name} has {_listed(stated)}, and a script's model and loss are its own",
            fix=" ".join(f"--set {key}={settings()[key].default}" for key in stated)
            + ", and do it in the script; or train with `dmt launch`",
        )


def _beyond_scripts(recipe: Recipe) -> dict[str, str]:
    """Settings and values that DMT's worker supports, but a script's model does not."""
    known = _IN_SCRIPTS | {"attention": "sdpa", "fused": "none"}
    stated = {name: getattr(recipe.kernels, name) for name in known}
    found = {
        f"kernels.{name}": value
        for name, value in stated.items()
        if value not in ("auto", known[name])
    }
    if recipe.kernels.fp8 is not None:
        found["kernels.fp8"] = recipe.kernels.fp8
    if (outer := recipe.parallel.outer) is not None:
        found["parallel.outer"] = f"{{replicas: {outer.replicas}}}"
    if recipe.parallel.balance != "none":
        found["parallel.balance"] = recipe.parallel.balance
    return found


def _listed(stated: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in stated.items())


def in_scripts(recipe: Recipe) -> Recipe:
    """The recipe for a script: open settings are planned for a script's model, except the
    attention kernel, which only affects speed."""
    stated = {name: getattr(recipe.kernels, name) for name in _IN_SCRIPTS}
    known = {name: _IN_SCRIPTS[name] for name, value in stated.items() if value == "auto"}
    changed: dict[str, object] = {f"kernels.{name}": value for name, value in known.items()}
    changed |= {
        key: value for key, value in _ASKED_FOR.items() if attrgetter(key)(recipe) == "auto"
    }
    found = recipe.with_values(changed)
    is_open = recipe.parallel.recompute == "auto"
    if is_open and isinstance(plan_recipe(found, explained=False).layout.recompute, int):
        return found.with_values({"parallel.recompute": "full"})  # all layers, or none
    return found


def in_accelerate(recipe: Recipe, plan: Plan) -> InAccelerate:
    """How Accelerate runs a plan.

    Raises PlanError, with the nearest plan that works, if it cannot.
    """
    words = BACKENDS[plan.engine].accelerate
    if recipe.training.batch_ramp is not None:
        raise _unable(recipe, "has training.batch_ramp", ["training.batch_ramp=null"])
    if isinstance(plan.layout.recompute, int):
        some = f"recomputes {recompute_text(plan.layout)}"
        raise _unable(recipe, some, ["parallel.recompute=full"])
    copies, ranks = plan.layout.replicate, plan.layout.dp
    if copies > 1 and (ranks % copies or ranks == copies):
        few = f"has {copies} copies of shards on {ranks} data-parallel ranks"
        raise _unable(recipe, few, ["parallel.replicate=1"])
    whole = plan.layout.tp == plan.layout.cp == plan.layout.ep == 1
    if plan.model == "hf" and words is not None and whole:
        return words
    able = next(name for name in BACKENDS.names if BACKENDS[name].accelerate is not None)
    changes = [f"parallel.engine={able}", "parallel.model=hf"]
    changes += [
        f"{one.key}=1" for one in DEGREES if one.key and one.of(recipe) not in (1, "auto")
    ]
    if recipe.parallel.sequence is True:
        changes.append("parallel.sequence=auto")
    if recipe.parallel.recompute == "selective":
        changes.append("parallel.recompute=full")
    found = degrees_text(plan.engine, plan.model, plan.layout)
    raise _unable(recipe, f"is planned as {found}", changes)


def _unable(recipe: Recipe, what: str, changes: Sequence[str]) -> PlanError:
    return PlanError(
        f"{recipe.name} {what}, which an Accelerate script cannot run",
        fix=" ".join(f"--set {change}" for change in changes)
        + "; or keep it with `dmt launch`",
    )


def _start(words: InAccelerate, cluster: ClusterSection) -> Iterator[tuple[str, object]]:
    yield "compute_environment", "LOCAL_MACHINE"
    yield "distributed_type", words.distributed_type(cluster.world_size)
    yield "use_cpu", cluster.gpu == "cpu"
    yield "num_machines", cluster.nodes
    yield "num_processes", cluster.world_size
    if cluster.nodes == 1:
        yield "machine_rank", 0
        yield "main_process_port", 0  # any free one
        return
    yield "machine_rank", ASK_FOR_RANK
    yield "main_process_ip", ASK_FOR_IP
    yield "main_process_port", PORT


def _heading(recipe: Recipe, words: InAccelerate) -> Iterator[str]:
    """Lines that the reader of the file must know."""
    yield f"{recipe.name} for Accelerate, written by `dmt render --to accelerate`. Use:"
    yield f"accelerate launch --config_file THIS_FILE {TRAIN} RECIPE"
    if recipe.cluster.nodes > 1:
        yield (
            "on every machine, with --machine_rank 0, 1, … and --main_process_ip ADDRESS of "
            "machine 0 before"
        )
        yield f"{TRAIN}. A file that is the same on all machines cannot say them."
    yield from words.notes
    if stated := _beyond_scripts(recipe):
        yield f"launch/train.py has {_listed(stated)}; a script of your own has not."
    if recipe.cluster.gpu == "cpu":
        yield (
            "On CPUs, a script that calls Accelerator() itself gets one process, or no shards; "
            "use"
        )
        yield "toolkit.accelerate.prepare(RECIPE) there. launch/train.py is not concerned."
