"""From a recipe to one plan: every `auto` decided once, with the reason written down.

The plan is made before anything runs and stored in the run directory; workers and
restarts read it and never decide again. The decisions here are simple rules over
a coarse memory estimate, good enough to choose a ZeRO stage.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import PlanError
from toolkit.hardware.catalogue import Gpu, gpu
from toolkit.models.spec import ModelSpec
from toolkit.plan.layout import Layout, Recompute
from toolkit.recipe.schema import ModelSection, Recipe, TrainingSection

MODEL_STATE_BYTES = 16
"""Bytes per parameter of AdamW training: fp32 weights and two moments (12), compute
weights and gradients (4 in bf16; in fp32 weights are shared, gradients take 4).
Source: ZeRO, arXiv:1910.02054, section 3.1."""
STATE_SHARE = 0.6
"""Share of a device's memory that model states may fill; activations need the rest."""
MICRO_BATCH_TOKENS = 8192
"""Tokens of one forward pass at which matrix products are large enough to be efficient."""
GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """How a recipe is carried out, and why."""

    engine: Literal["deepspeed", "ddp"]
    model: Literal["hf"]
    layout: Layout
    parameters: int
    """Parameters of the model."""
    flops_per_token: float
    """Training FLOPs per token, attention counted as masked; the numerator of MFU."""
    peak_flops_per_gpu: float | None
    """Peak of one device in the recipe's precision; None where it is unknown."""
    model_states_gib: float
    """Parameters, gradients and optimizer states on the fullest rank, in GiB."""
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

    Raises PlanError when the batch cannot be spread over the cluster.
    """
    spec = ModelSpec.from_config(model_config(recipe.model))
    device = gpu(recipe.cluster.gpu)
    parameters = spec.parameters.total
    precision = recipe.training.precision
    engine, engine_reason = _engine(recipe)
    stage, stage_reason = _zero_stage(recipe, engine, parameters, device)
    dp = recipe.cluster.world_size
    micro_batch, micro_reason = _micro_batch(recipe.training, dp)
    recompute, recompute_reason = _recompute(recipe, spec, device)
    zero = recipe.parallel.zero
    layout = Layout(
        dp=dp,
        zero_stage=stage,
        offload_optimizer=zero.offload_optimizer,
        offload_parameters=zero.offload_parameters,
        recompute=recompute,
        micro_batch=micro_batch,
        gradient_accumulation=recipe.training.global_batch_size // (dp * micro_batch),
    )
    return Plan(
        engine=engine,
        model="hf",
        layout=layout,
        parameters=parameters,
        flops_per_token=spec.flops_per_token_causal(recipe.training.sequence_length),
        peak_flops_per_gpu=device.peak_flops(precision),
        model_states_gib=model_state_bytes(parameters, stage, dp) / GIB,
        reasons=(engine_reason, stage_reason, micro_reason, recompute_reason),
    )


def model_config(model: ModelSection) -> dict[str, Any]:
    """The Hugging Face config of a recipe's model: stated, or read from `hub`.

    Raises PlanError when it is not stated and cannot be read.
    """
    if model.config is not None:
        return model.config
    assert model.hub is not None, "checked at load"
    path = Path(model.hub) / "config.json"
    if not Path(model.hub).is_dir():
        path = _download_config(model.hub, model.revision)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"model.hub: cannot read {path}: {error}",
            fix="check the folder, or set model.config",
        ) from error
    return config


def _download_config(hub: str, revision: str | None) -> Path:
    """The cached or downloaded config.json of a hub id."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(hub, "config.json", revision=revision))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise PlanError(
            f"model.hub: {hub!r} is neither a local folder nor reachable on the hub "
            f"({type(error).__name__})",
            fix="state the shape in model.config to plan offline, or point at a local folder",
        ) from error


def model_state_bytes(parameters: int, stage: int, dp: int) -> float:
    """Bytes of model states per rank under a ZeRO stage.

    Source: ZeRO, arXiv:1910.02054, figure 1: 2Ψ weights, 2Ψ gradients, 12Ψ optimizer.
    """
    weights, gradients, optimizer = 2.0, 2.0, 12.0
    if stage >= 1:
        optimizer /= dp
    if stage >= 2:
        gradients /= dp
    if stage >= 3:
        weights /= dp
    return parameters * (weights + gradients + optimizer)


def _engine(recipe: Recipe) -> tuple[Literal["deepspeed", "ddp"], str]:
    wanted = recipe.parallel.engine
    if wanted == "ddp":
        return "ddp", "engine ddp: asked for"
    assert wanted in ("auto", "deepspeed"), "checked at load"
    reason = "asked for" if wanted == "deepspeed" else "auto; ZeRO shards what ddp would copy"
    return "deepspeed", f"engine deepspeed: {reason}"


def _zero_stage(
    recipe: Recipe, engine: str, parameters: int, device: Gpu
) -> tuple[Literal[0, 1, 2, 3], str]:
    """The smallest sharding that leaves room for activations."""
    zero = recipe.parallel.zero
    if engine == "ddp":
        return 0, "zero 0: ddp shards nothing"
    if zero.stage != "auto":
        return zero.stage, f"zero {zero.stage}: asked for"
    if zero.offload_parameters != "none" or zero.offload_optimizer == "nvme":
        return 3, "zero 3: parameter offload and NVMe need it"
    dp = recipe.cluster.world_size
    if device.memory_gib is None:
        stage: Literal[0, 1, 2, 3] = 2 if dp > 1 or zero.offload_optimizer != "none" else 0
        return stage, f"zero {stage}: auto on CPU, where memory is not the limit"
    least: Literal[1, 2] = 2 if zero.offload_optimizer != "none" else 1
    budget = device.memory_gib * GIB * STATE_SHARE
    for candidate in (least, 2, 3):
        needed = model_state_bytes(parameters, candidate, dp)
        if needed <= budget:
            return candidate, (
                f"zero {candidate}: model states take {needed / GIB:.1f} GiB of "
                f"{device.memory_gib:g} GiB per GPU"
            )
    needed = model_state_bytes(parameters, 3, dp)
    return 3, (
        f"zero 3: WARNING: model states take {needed / GIB:.1f} GiB of {device.memory_gib:g} "
        "GiB per GPU even so; use more GPUs or offload"
    )


def _micro_batch(training: TrainingSection, dp: int) -> tuple[int, str]:
    """The recipe's micro batch, or the largest divisor of a rank's share that is efficient."""
    share, rest = divmod(training.global_batch_size, dp)
    if rest:
        near = max(dp, training.global_batch_size // dp * dp)
        raise PlanError(
            f"training.global_batch_size: {training.global_batch_size} sequences cannot be "
            f"spread evenly over {dp} ranks",
            fix=f"set it to {near} or {near + dp}",
        )
    if training.micro_batch_size != "auto":
        return training.micro_batch_size, f"micro batch {training.micro_batch_size}: asked for"
    limit = max(1, MICRO_BATCH_TOKENS // training.sequence_length)
    size = max(n for n in range(1, min(share, limit) + 1) if share % n == 0)
    return size, (
        f"micro batch {size}: {size * training.sequence_length:,} tokens per forward pass, "
        f"{share // size} times a step"
    )


def _recompute(recipe: Recipe, spec: ModelSpec, device: Gpu) -> tuple[Recompute, str]:
    """Full recompute where stored activations would not fit beside the model states."""
    wanted = recipe.parallel.recompute
    if wanted != "auto":
        return wanted, f"recompute {wanted}: asked for"
    if device.memory_gib is None:
        return "none", "recompute none: auto on CPU"
    length = recipe.training.sequence_length
    # Korthikanti et al., arXiv:2205.05198, eq. 2, without the attention scores, which
    # fused attention does not store: 34 bytes per token, hidden unit and layer.
    needed = 34 * length * spec.hidden * spec.layers / GIB
    room = device.memory_gib * (1 - STATE_SHARE)
    if needed <= room:
        return "none", f"recompute none: {needed:.1f} GiB of activations per sequence fit"
    return "full", f"recompute full: {needed:.1f} GiB of activations per sequence do not fit"
