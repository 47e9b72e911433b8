"""From a recipe to one plan: every `auto` decided once, with the reason written down.

The plan is made before anything runs and stored in the run directory; workers and
restarts read it and never decide again. The decisions here are simple rules over
a coarse memory estimate, good enough to choose a ZeRO stage.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from toolkit.errors import PlanError, RecipeError
from toolkit.hardware.catalogue import Gpu, gpu
from toolkit.models.config_check import check_config
from toolkit.models.spec import ModelSpec
from toolkit.plan import legality, model_rules
from toolkit.plan.degrees import choose_degrees
from toolkit.plan.layout import Layout, Recompute
from toolkit.plan.legality import EngineName, ModelName, Pair, Stage
from toolkit.plan.memory import GIB, building_gib, model_states_gib, states_peak_gib
from toolkit.plan.model_rules import Job, able_pairs
from toolkit.plan.workload import Workload, planned_workload
from toolkit.recipe.schema import ModelSection, Recipe, TrainingSection

STATE_SHARE = 0.6
"""Share of a device's memory that model states may fill; activations need the rest."""
MICRO_BATCH_TOKENS = 8192
"""Tokens of one forward pass at which matrix products are large enough to be efficient."""


class ShapeUnknown(PlanError):
    """The model's shape is only on the hub, and not reachable now."""


@dataclass(frozen=True)
class Plan:
    """How a recipe is carried out, and why."""

    engine: EngineName
    model: ModelName
    layout: Layout
    parameters: int
    """Parameters of the model."""
    flops_per_token: float
    """Training FLOPs per token, attention counted as masked; the numerator of MFU."""
    peak_flops_per_gpu: float | None
    """Peak of one device in the recipe's precision; None where it is unknown."""
    model_states_gib: float
    """Parameters, gradients and optimizer states on the fullest device, in GiB."""
    reasons: tuple[str, ...]
    """One line per decision."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `plan.json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote."""
        fields = dict(data)
        return cls(
            **{
                **fields,
                "layout": Layout(**fields["layout"]),
                "reasons": tuple(fields["reasons"]),
            }
        )


def plan_recipe(recipe: Recipe) -> Plan:
    """Decide everything that the recipe leaves open.

    Raises PlanError when the batch cannot be spread over the cluster or the model's shape
    cannot be found out, RecipeError when `parallel` is illegal after all: the recipe was
    checked at load, but its own DeepSpeed file may have set the ZeRO stage since.
    """
    parallel, training = recipe.parallel, recipe.training
    if found := legality.problems(parallel, recipe.cluster):
        raise RecipeError(found)
    job = Job(parallel, recipe.cluster, training, model_config(recipe.model))
    if found := model_rules.problems(job):
        raise RecipeError(found)
    spec, device = job.spec, gpu(recipe.cluster.gpu)
    pair, pair_reason = _pair(job)
    workload = planned_workload(spec, training, pair)
    room_gib = inf if device.memory_gib is None else device.memory_gib * STATE_SHARE
    layout, degree_reasons = choose_degrees(job, pair, workload, room_gib)
    layout, micro_reason = _split_batch(training, layout)
    layout, stage_reason = _in_zero_stage(recipe, pair, layout, workload, device)
    recompute, recompute_reason = _recompute(recipe, layout, spec, device)
    return Plan(
        engine=pair.engine,
        model=pair.model,
        layout=replace(layout, recompute=recompute),
        parameters=spec.parameters.total,
        flops_per_token=spec.flops_per_token_causal(training.sequence_length),
        peak_flops_per_gpu=device.peak_flops(training.precision),
        model_states_gib=model_states_gib(workload, layout),
        reasons=(pair_reason, *degree_reasons, stage_reason, micro_reason, recompute_reason),
    )


def model_config(model: ModelSection, *, download: bool = True) -> dict[str, Any]:
    """The Hugging Face config of a recipe's model: stated, or read from `hub`.

    Without `download`, a hub id is looked for only in the hub's local cache. Raises
    PlanError when it cannot be read, ShapeUnknown where that is because of the network.
    """
    if model.config is not None:
        return model.config
    assert model.hub is not None, "checked at load"
    path = Path(model.hub) / "config.json"
    if not Path(model.hub).is_dir():
        path = _hub_config(model.hub, model.revision, download)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        problems = check_config(config)
    except (OSError, ValueError, AttributeError) as error:
        raise PlanError(
            f"model.hub: cannot read {path}: {error}",
            fix="check the folder, or set model.config",
        ) from error
    if problems:
        raise PlanError(
            f"model.hub: {path} says {problems[0].key}: {problems[0].found}; planned are "
            f"{problems[0].allowed}",
            fix="choose another model",
        )
    return config


def _hub_config(hub: str, revision: str | None, download: bool) -> Path:
    """The cached or downloaded config.json of a hub id."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    fix = "state the shape in model.config to plan offline, or point at a local folder"
    try:
        if download:
            return Path(hf_hub_download(hub, "config.json", revision=revision))
        # hf_hub_download(local_files_only=True) asks the network for other things.
        found = try_to_load_from_cache(hub, "config.json", revision=revision)
        if not isinstance(found, str):
            raise LocalEntryNotFoundError("not cached")
        return Path(found)
    except HFValidationError as error:
        raise PlanError(
            f"model.hub: {hub} is neither a folder nor a hub id", fix=fix
        ) from error
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        missing = "reachable on the hub" if download else "in the hub's local cache"
        raise ShapeUnknown(
            f"model.hub: {hub!r} is neither a local folder nor {missing} "
            f"({type(error).__name__})",
            fix=fix,
        ) from error


def _pair(job: Job) -> tuple[Pair, str]:
    """The preferred pair of engine and model that can do all that the recipe asks."""
    able = able_pairs(job)
    assert able, "no problem was found"
    best, asked = able[0], job.parallel
    if asked.engine != "auto":
        return best, f"{best}: asked for"
    others = ", ".join(dict.fromkeys(p.engine for p in able if p.engine != best.engine))
    why = f"auto; preferred to {others}" if others else "auto; the only one that can do this"
    return best, f"{best}: {why}"


def _in_zero_stage(
    recipe: Recipe, pair: Pair, layout: Layout, workload: Workload, device: Gpu
) -> tuple[Layout, str]:
    """The layout in the lowest ZeRO stage that leaves room for activations."""
    legal = legality.zero_stages(recipe.parallel, pair)
    least = _least_stage(recipe, pair, layout.dp, device)
    open_to = [stage for stage in legal if stage >= least] or legal[-1:]
    if pair.engine == "megatron" and least in legal:
        open_to = [least]  # sharding over a single rank saves nothing
    candidates = [replace(layout, zero_stage=stage) for stage in open_to]
    room = inf if device.memory_gib is None else device.memory_gib * STATE_SHARE
    chosen = next(
        (one for one in candidates if states_peak_gib(workload, one) <= room), candidates[-1]
    )
    if recipe.parallel.zero.stage != "auto":
        why = "asked for"
    elif legality.TABLE[pair].zero_stages == (0,):
        why = f"{pair.engine} shards nothing"
    elif pair.engine == "megatron":
        why = "auto; a single data-parallel rank has nothing to shard"
        if layout.dp > 1:
            why = f"auto; megatron-core's distributed optimizer on {layout.dp:,} ranks"
    elif len(legal) == 1:
        why = "the only stage with this offload"
    else:
        why = "auto" if device.memory_gib else "auto on CPU, where memory is not the limit"
    note = _memory_note(workload, chosen, device)
    return chosen, f"zero {chosen.zero_stage}: {why}{note}"


def _memory_note(workload: Workload, layout: Layout, device: Gpu) -> str:
    """What the model states take of a device, and a warning where that is too much."""
    if device.memory_gib is None:
        return ""
    needed_gib, built_gib = model_states_gib(workload, layout), building_gib(workload, layout)
    room_gib = device.memory_gib * STATE_SHARE
    note = f"model states take {needed_gib:.1f} of {device.memory_gib:g} GiB per GPU"
    if built_gib > needed_gib:
        note += f", and {built_gib:.1f} while the model is built, before ZeRO shards it"
    if max(needed_gib, built_gib) <= room_gib:
        return f"; {note}"
    if built_gib > room_gib >= needed_gib:
        instead = "use a higher tensor degree, or engine megatron with pipeline stages"
        return f"; WARNING: {note}: {instead}"
    instead = ", a higher stage or offload" if workload.engine == "deepspeed" else ""
    return f"; WARNING: {note}, which leaves little for activations: use more GPUs{instead}"


def _least_stage(recipe: Recipe, pair: Pair, dp: int, device: Gpu) -> Stage:
    """The stage to begin with where the recipe leaves it open."""
    if pair.engine == "megatron":
        return 1 if dp > 1 else 0
    if recipe.parallel.zero.offload_optimizer != "none":
        return 2  # gradients are needed where the optimizer is
    if dp > 1 and (device.memory_gib is None or recipe.training.precision != "fp32"):
        # In 16 bits, stage 1 keeps the fp32 sum of all gradients whole on every rank.
        return 2
    if device.memory_gib is not None:
        return 1
    # In 16 bits, DeepSpeed's stage 0 sums micro batches in 16 bits.
    return 0 if recipe.training.precision == "fp32" else 1


def _split_batch(training: TrainingSection, layout: Layout) -> tuple[Layout, str]:
    """The layout with its batch split: the recipe's micro batch, or the largest efficient one.

    Raises PlanError, naming the nearest global batches that can be spread evenly.
    """
    wanted, batch, dp = training.micro_batch_size, training.global_batch_size, layout.dp
    unit = dp if wanted == "auto" else dp * wanted
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        micro = "" if wanted == "auto" else f" in micro batches of {wanted}"
        raise PlanError(
            f"training.global_batch_size: {batch} sequences cannot be spread evenly over "
            f"{dp} ranks{micro}",
            fix="set it to " + (f"{below} or {above}" if below else f"{above}"),
        )
    share = batch // dp
    size = _micro_batch(training, share, layout) if wanted == "auto" else wanted
    tokens, times = size * training.sequence_length, share // size
    reason = f"micro batch {size}: asked for"
    if wanted == "auto":
        often = "once" if times == 1 else f"{times} times"
        reason = f"micro batch {size}: {tokens:,} tokens per forward pass, {often} a step"
    if layout.pp > 1:
        # Narayanan et al., arXiv:2104.04473, section 2.2: bubble over ideal time.
        bubble = (layout.pp - 1) / (layout.vpp * times)
        reason += f"; the pipeline idles for {bubble:.0%} of the time that it computes"
    return replace(layout, micro_batch=size, gradient_accumulation=times), reason


def _micro_batch(training: TrainingSection, share: int, layout: Layout) -> int:
    """The largest divisor of a rank's share that is efficient and keeps a pipeline busy."""
    limit = max(1, MICRO_BATCH_TOKENS // training.sequence_length)

    def fills_pipeline(size: int) -> bool:
        times = share // size
        if layout.vpp > 1:  # the interleaved schedule takes one per stage at a time
            return times % layout.pp == 0
        return times >= min(layout.pp, share)

    sizes = (size for size in range(1, min(share, limit) + 1) if share % size == 0)
    return max(filter(fills_pipeline, sizes))


def _recompute(
    recipe: Recipe, layout: Layout, spec: ModelSpec, device: Gpu
) -> tuple[Recompute, str]:
    """Full recompute where stored activations would not fit beside the model states."""
    wanted = recipe.parallel.recompute
    if wanted != "auto":
        return wanted, f"recompute {wanted}: asked for"
    if device.memory_gib is None:
        return "none", "recompute none: auto on CPU"
    tokens = layout.micro_batch * recipe.training.sequence_length
    # Korthikanti et al., arXiv:2205.05198, eq. 2 and 4, without the attention scores, which
    # fused attention does not store: 34 bytes per token, hidden unit and layer, of which
    # tensor parallel splits 24 and sequence parallel the other 10.
    whole = 10 / layout.tp if layout.sequence_parallel else 10
    per_layer = (whole + 24 / layout.tp) * tokens * spec.hidden
    # The first pipeline stage holds as many micro batches as there are stages.
    held = min(layout.pp, layout.gradient_accumulation)
    needed = per_layer * spec.layers / layout.pp * held / GIB
    room = device.memory_gib * (1 - STATE_SHARE)
    stored = f"{needed:.1f} GiB of activations per micro batch"
    if held > 1:
        stored = f"{needed:.1f} GiB of activations of {held} micro batches"
    if needed <= room:
        return "none", f"recompute none: {stored} fit in {room:.0f} GiB"
    return "full", f"recompute full: {stored} do not fit in {room:.0f} GiB"
