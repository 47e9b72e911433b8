"""The file that `accelerate launch --config_file` takes, from a recipe and its plan.

One file holds everything: it contains DeepSpeed's complete JSON as text, which Accelerate
takes instead of a file's name (`deepspeed_config_file`). Accelerate's own DeepSpeed keys
(`zero_stage`, `gradient_clipping`, …) are not used: they cannot say all of it, and what they
leave out DeepSpeed fills by defaults that change the loss (clipping at 1.0, gradients of
micro batches summed in bf16).

The keys are those of accelerate's commands/config/config_args.py and commands/launch.py.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.backend import EngineName
from toolkit.engines.deepspeed.presets import preset_path
from toolkit.errors import PlanError
from toolkit.layout import Layout
from toolkit.plan.planner import Plan
from toolkit.plan.rules.legality import DEGREES
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import ClusterSection, Recipe

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's word for a recipe's precision."""

PORT = 29500
"""PyTorch's and Accelerate's usual port, on which several machines meet."""

ASK_FOR_RANK = "give --machine_rank N on the command line, 0 on the first machine"
"""Stands in the file of several machines: Accelerate's default would be 0 on each of them, and
they would wait for each other. As it is no number, Accelerate stops and quotes it."""

ASK_FOR_IP = "give --main_process_ip on the command line"

COMMON: Mapping[str, tuple[EngineName, Layout]] = {
    "ddp": ("ddp", Layout()),
    "zero1": ("deepspeed", Layout(zero_stage=1)),
    "zero2": ("deepspeed", Layout(zero_stage=2)),
    "zero2_offload": ("deepspeed", Layout(zero_stage=2, offload_optimizer="cpu")),
    "zero3": ("deepspeed", Layout(zero_stage=3)),
    "zero3_offload": (
        "deepspeed",
        Layout(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    ),
    "fsdp2": ("fsdp", Layout(zero_stage=3)),
}
"""The files of `launch/accelerate/`; those of DeepSpeed are named like their preset."""


def render(recipe: Recipe, plan: Plan) -> str:
    """The YAML text for a recipe on its cluster.

    Raises PlanError where the plan's model is megatron-core's, RecipeError where the
    recipe's own DeepSpeed file disagrees with the recipe.
    """
    refuse_megatron(recipe, plan)
    deepspeed = plan.backend.render(recipe, plan.layout) if plan.engine == "deepspeed" else {}
    precision = MIXED_PRECISION[recipe.training.precision]
    body = _body(plan.engine, plan.layout, recipe.cluster, precision, script_config(deepspeed))
    return "".join(f"# {line}\n" for line in _heading(recipe, plan)) + body


def render_common(name: str) -> str:
    """The YAML text of `launch/accelerate/NAME.yaml`: bf16 on one machine with 8 GPUs.

    What only a recipe can say stays `"auto"` in DeepSpeed's JSON: Accelerate fills it.
    """
    engine, layout = COMMON[name]
    deepspeed: dict[str, Any] = {}
    if engine == "deepspeed":
        deepspeed = json.loads(preset_path(name).read_text(encoding="utf-8"))
    cluster = ClusterSection(nodes=1, gpus_per_node=8, gpu="h100-80gb")
    heading = (
        "Written by `python -m toolkit.accelerate.common`. For your own recipe and cluster:",
        "dmt render RECIPE --to accelerate --out FILE. Use:",
        f"accelerate launch --config_file launch/accelerate/{name}.yaml --num_processes N "
        f"{'--mixed_precision bf16 ' if engine == 'deepspeed' else ''}…",
        *_precision_note(engine),
    )
    body = _body(engine, layout, cluster, "bf16", deepspeed)
    return "".join(f"# {line}\n" for line in heading) + body


def script_config(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON for a script that brings its own optimizer, as Accelerate wants it.

    Accelerate refuses a torch optimizer together with an `optimizer` block.
    """
    return {key: value for key, value in deepspeed.items() if key != "optimizer"}


def refuse_megatron(recipe: Recipe, plan: Plan) -> None:
    """Raises PlanError where Accelerate has no words for a plan, with the nearest that has."""
    if plan.model == "hf":
        return
    changes = ["parallel.engine=deepspeed", "parallel.model=hf"]
    for name in DEGREES:
        if getattr(recipe.parallel, name) not in (1, "auto"):
            changes.append(f"parallel.{name}=1")
    if recipe.parallel.sequence is True:
        changes.append("parallel.sequence=auto")
    if recipe.parallel.recompute == "selective":
        changes.append("parallel.recompute=full")
    raise PlanError(
        f"{recipe.name} runs on the engine {plan.engine} with megatron-core's model, which an "
        "Accelerate script cannot use",
        fix=" ".join(f"--set {change}" for change in changes)
        + "; or keep the layout with `dmt launch`",
    )


def _body(
    engine: EngineName,
    layout: Layout,
    cluster: ClusterSection,
    precision: str,
    deepspeed: Mapping[str, Any],
) -> str:
    """The settings themselves. `deepspeed` is the JSON of engine deepspeed."""
    settings = dict(_start(engine, cluster))
    if engine == "deepspeed":
        # Accelerate refuses a mixed_precision together with the JSON, which states it.
        return dump(settings, flow=False) + _deepspeed(deepspeed)
    settings["mixed_precision"] = precision
    if engine == "fsdp":
        settings["fsdp_config"] = _fsdp(layout)
    return dump(settings, flow=False)


def _start(engine: EngineName, cluster: ClusterSection) -> Iterator[tuple[str, object]]:
    """Which processes are started."""
    yield "compute_environment", "LOCAL_MACHINE"
    yield "distributed_type", _distributed_type(engine, cluster.world_size)
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


def _distributed_type(engine: EngineName, world: int) -> str:
    """Accelerate's kind of run. On a CPU, its MULTI_CPU starts one process only."""
    if engine == "ddp":
        return "MULTI_GPU" if world > 1 else "NO"
    return {"deepspeed": "DEEPSPEED", "fsdp": "FSDP"}[engine]


def _deepspeed(config: Mapping[str, Any]) -> str:
    settings = {
        "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
        # Accelerate on each machine, not pdsh from the first one.
        "deepspeed_multinode_launcher": "standard",
    }
    head = dump({"deepspeed_config": settings}, flow=False)
    text = textwrap.indent(json.dumps(config, indent=2), "    ")
    return f"{head}  deepspeed_config_file: |-\n{text}\n"


def _fsdp(layout: Layout) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": layout.offload_parameters == "cpu",
        "fsdp_activation_checkpointing": layout.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _heading(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What the reader of the file must know."""
    yield f"{recipe.name} for Accelerate, written by `dmt render --to accelerate`. Use:"
    yield "accelerate launch --config_file THIS_FILE launch/train.py RECIPE"
    if recipe.cluster.nodes > 1:
        yield (
            "on every machine, with --machine_rank 0, 1, … and --main_process_ip ADDRESS of "
            "machine 0 before"
        )
        yield "launch/train.py. A file that is the same on all machines cannot say them."
    yield from _precision_note(plan.engine)
    if recipe.cluster.gpu == "cpu":
        yield (
            "On CPUs, a script that calls Accelerator() itself gets one process, or no shards; "
            "use"
        )
        yield "toolkit.accelerate.accelerator(RECIPE) there. launch/train.py is not concerned."


def _precision_note(engine: EngineName) -> Iterator[str]:
    """Where Accelerate's own meaning of a setting is not the recipe's."""
    if engine == "fsdp":
        yield (
            "With mixed_precision, Accelerator() also reduces gradients in 16 bits; "
            "launch/train.py"
        )
        yield "and toolkit.accelerate.accelerator(RECIPE) do so in fp32."
