"""From a layout to the JSON that DeepSpeed reads: a preset with every `"auto"` filled.

A preset (or the user's own file) configures how DeepSpeed works: buckets, prefetch, aio. The
recipe decides what to train: the settings of `OWNED`. If the file disagrees with the recipe on
one of them, it is refused, because either could be meant.
"""

import copy
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.engines.deepspeed.keys import GONE, KNOWN_KEYS, REMOVED
from toolkit.engines.deepspeed.presets import PRESETS, preset_for, preset_path
from toolkit.errors import Problem, RecipeError
from toolkit.intake.foreign import later_value
from toolkit.layout import Layout, Placement, Precision, Stage
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.recipe.schema import OptimizerSection
from toolkit.text.dotted import get, put
from toolkit.text.suggest import did_you_mean

ZERO = "zero_optimization"
OFFLOAD_OPTIMIZER = f"{ZERO}.offload_optimizer"
OFFLOAD_PARAMETERS = f"{ZERO}.offload_param"

DEFAULTS: Mapping[str, object] = {
    # 0 is dynamic scaling; the other numbers are DeepSpeed's own defaults.
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    # The training loop prints progress and timing.
    "steps_per_print": 1_000_000_000,
    "wall_clock_breakdown": False,
}
"""Written if the file does not state them."""

OWNED: Mapping[str, str] = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": (
        "training.global_batch_size / (training.micro_batch_size · dp)"
    ),
    "gradient_clipping": "optimizer.clip_grad_norm",
    "bf16.enabled": "training.precision",
    "fp16.enabled": "training.precision",
    "optimizer.type": "optimizer.name",
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    f"{ZERO}.stage": "parallel.zero.stage",
    f"{OFFLOAD_OPTIMIZER}.device": "parallel.zero.offload_optimizer",
    f"{OFFLOAD_OPTIMIZER}.nvme_path": "parallel.zero.nvme_path",
    f"{OFFLOAD_PARAMETERS}.device": "parallel.zero.offload_parameters",
    f"{OFFLOAD_PARAMETERS}.nvme_path": "parallel.zero.nvme_path",
}
"""Settings that the recipe decides, and the recipe key of each."""

REQUIRED: Mapping[str, object] = {
    "optimizer.params.adam_w_mode": True,
    "gradient_allreduce_op": "mean",
    "bf16.check_grad_overflow": True,
    f"{ZERO}.compute_grad_norm": True,
    "fp16.fp16_master_weights_and_grads": False,
    "torch_autocast.enabled": False,
    "data_efficiency.enabled": False,
    "use_data_before_expert_parallelism": False,
}
"""The only values that keep the loss equal under every layout (AdamW with fp32 master
weights and moments, mean gradients, the recipe's precision and data order) and keep NaN
out of the weights."""

HPZ = f"{ZERO}.zero_hpz_partition_size"
QUANTIZED_GRADIENTS = f"{ZERO}.zero_quantized_gradients"
LESS_EXACT: Mapping[str, tuple[str, str]] = {
    f"{ZERO}.zero_quantized_weights": ("gathered weights", "sent in blocks of 8 bits"),
    QUANTIZED_GRADIENTS: ("gradient reduction", "in blocks of 4 bits between nodes"),
    "bf16.bf16_master_weights_and_grads": (
        "AdamW",
        "weights are updated in bf16: a change by less than 1/512 may be lost",
    ),
    "bf16.bf16_optimizer_states": ("moments", "kept in bf16"),
}
"""Switches of a DeepSpeed file that are handed over although they round more than the
recipe's precision: what they apply to, and how it is rounded."""

_NOT_RUN: Mapping[str, str] = {
    f"{ZERO}.zenflow": "ZenFlow permutes the initial weights, updates some of them after every "
    "micro batch, and keeps states that no checkpoint has",
    f"{OFFLOAD_OPTIMIZER}.super_offload": "no checkpoint has the moments, which are in a "
    "process of their own; without clipping a NaN in a gradient sets weights to 0",
    "tensor_parallel": "tensor parallel is megatron-core's (parallel.tensor in the recipe)",
    "expert_parallel": "expert parallel is megatron-core's (parallel.expert in the recipe)",
    "compile.deepcompile": "its graphs reduce gradients before a step can be skipped; "
    "kernels.compile compiles layers",
}
"""What DeepSpeed 0.19 has, and why no run can use it (docs/limitations.md)."""

MAX_LISTED = 12
"""For blocks with at most this many keys, an error lists all of them."""

MAX_FLOAT = sys.float_info.max

AUTO_IS_A_VALUE = frozenset({"data_types.keep_in_fp32_modules", "pipeline.stages"})
"""Settings for which DeepSpeed itself understands "auto"."""


@dataclass(frozen=True)
class DeepSpeedRequest:
    """The renderer's inputs."""

    layout: Layout
    precision: Precision
    optimizer: OptimizerSection
    nvme_path: str | None = None
    """Folder for NVMe offload (`parallel.zero.nvme_path`)."""
    config: str | None = None
    """`parallel.zero.config`: a preset's name or a JSON file; None for the preset that
    fits the layout."""
    loss_scale: float | None = None
    """The plan's initial loss scale, a power of two; None unless fp16."""


def render(request: DeepSpeedRequest) -> dict[str, object]:
    """The complete DeepSpeed config of a run, ready for `deepspeed.initialize`.

    Raises RecipeError with every problem of the file: a value that disagrees with the
    recipe, an unknown key, an `"auto"` that nothing fills, a scheduler, an optimizer
    other than AdamW, or a file that cannot be read.
    """
    file = open_config(request.config or preset_for(request.layout))
    owned = _owned(request)
    batch = request.layout.global_batch
    if _stated(file, "train_batch_size") == batch * request.layout.cp:
        batch *= request.layout.cp  # a file that was rendered counts context ranks, too
    stated = owned | {"train_batch_size": batch}
    problems = [
        *unknown_keys(file),
        *_disagreements(file, stated, {**REQUIRED, **_loss_scaling(request)}),
        *_not_ours_to_run(file, request.optimizer),
        *_unfilled(file, owned),
        *_missing_folder(file, request),
        *_misread(file, request),
    ]
    if problems:
        raise RecipeError(sorted(problems, key=lambda problem: problem.line))
    config = copy.deepcopy(dict(file.values))
    for key, value in owned.items():
        # An absent block also means no offload.
        needed = value not in (None, "none")
        if needed or get(config, key) is not None:
            put(config, key, value)
    for key, value in {
        **DEFAULTS,
        **_loss_scaling(request),
        **_by_layout(request, file),
    }.items():
        if get(file.values, key) is None:
            put(config, key, value)
    return config


def open_config(config: str) -> JsonFile:
    """A preset by its name, or a JSON file.

    Raises RecipeError when it is neither, or not a readable JSON object.
    """
    if config in PRESETS:
        return read_json(preset_path(config))
    if "." in config or "/" in config:
        return read_json(Path(config))
    raise RecipeError(
        [
            Problem(
                "parallel.zero.config",
                config,
                f"{', '.join(PRESETS)}, or a DeepSpeed JSON file of your own",
                did_you_mean(config, PRESETS),
            )
        ]
    )


def stage_of(file: JsonFile) -> Stage | None:
    """The ZeRO stage that a config states; None when it leaves it to the recipe.

    Raises RecipeError if it states an invalid stage.
    """
    stage = _stated(file, f"{ZERO}.stage")
    if stage is None or (type(stage) is int and stage in get_args(Stage)):
        return cast(Stage | None, stage)
    raise RecipeError([file.problem(f"{ZERO}.stage", stage, "0, 1, 2 or 3")])


def offload_of(file: JsonFile) -> tuple[Placement | None, Placement | None]:
    """Where a config puts optimizer states and parameters; None if it does not state it.

    Raises RecipeError if it states an invalid device.
    """
    return _device(file, OFFLOAD_OPTIMIZER), _device(file, OFFLOAD_PARAMETERS)


def communication_bytes(file: JsonFile) -> int | None:
    """Bytes per gradient element that a config states (`communication_data_type`); None where
    it does not."""
    return {"fp32": 4, "fp16": 2, "bf16": 2}.get(str(_stated(file, "communication_data_type")))


def _device(file: JsonFile, block: str) -> Placement | None:
    device = _stated(file, f"{block}.device")
    if device is None or device in get_args(Placement):
        return cast(Placement | None, device)
    raise RecipeError([file.problem(f"{block}.device", device, "none, cpu or nvme")])


def _owned(request: DeepSpeedRequest) -> dict[str, object]:
    """Every setting that the recipe decides, by DeepSpeed's name for it."""
    layout, optimizer = request.layout, request.optimizer
    ranks = layout.dp * layout.cp
    settings: dict[str, object] = {
        # DeepSpeed counts context-parallel ranks as data-parallel ones. Where samples moved,
        # the numbers are those of the plan: their product must hold, and it only logs them.
        "train_batch_size": ranks * layout.micro_batch * layout.gradient_accumulation,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        # DeepSpeed clips at 1.0 unless configured not to.
        "gradient_clipping": optimizer.clip_grad_norm or 0.0,
        "bf16.enabled": request.precision == "bf16",
        "fp16.enabled": request.precision == "fp16",
        "optimizer.type": optimizer.kind.elsewhere.get("deepspeed.json"),
        "optimizer.params.lr": optimizer.learning_rate,
        "optimizer.params.betas": list(optimizer.betas),
        "optimizer.params.eps": optimizer.eps,
        "optimizer.params.weight_decay": optimizer.weight_decay,
        f"{ZERO}.stage": layout.zero_stage,
    }
    if settings["optimizer.type"] is None:  # DeepSpeed gets the optimizer itself
        settings |= {key: None for key in settings if key.startswith("optimizer.")}
    for block, device, _ in _offloads(layout):
        folder = request.nvme_path if device == "nvme" else None
        settings[f"{block}.device"] = device
        if folder is not None or device != "nvme":
            settings[f"{block}.nvme_path"] = folder
    return settings


def _offloads(layout: Layout) -> tuple[tuple[str, Placement, str], ...]:
    """DeepSpeed's block, the device and the recipe key of each kind of offload."""
    return (
        (OFFLOAD_OPTIMIZER, layout.offload_optimizer, "parallel.zero.offload_optimizer"),
        (OFFLOAD_PARAMETERS, layout.offload_parameters, "parallel.zero.offload_parameters"),
    )


def _by_layout(request: DeepSpeedRequest, file: JsonFile) -> dict[str, object]:
    """Settings that follow from the layout if the file does not state them."""
    settings: dict[str, object] = {}
    if request.optimizer.kind.whole is None and request.layout.offload_optimizer == "none":
        # PyTorch's AdamW: DeepSpeed's fused one is compiled at first use.
        settings["optimizer.params.torch_adam"] = True
        stated: Any = get(file.values, "optimizer.params") or {}
        if not {"torch_adam", "foreach"} & stated.keys():
            # One pass over the shard; PyTorch's default makes about ten on a CPU.
            settings["optimizer.params.fused"] = True
    if request.precision == "bf16" and request.layout.zero_stage > 0:
        # Otherwise micro batches are summed in bf16. Stage 0 has no alternative.
        settings["data_types.grad_accum_dtype"] = "fp32"
    fp32 = sends_fp32(request.precision, request.layout.zero_stage)
    if fp32 and not _stated(file, QUANTIZED_GRADIENTS):
        # Otherwise the ranks' gradients are summed in 16 bits. Quantization supports only
        # those.
        settings["communication_data_type"] = "fp32"
    return settings


def sends_fp32(precision: str, zero_stage: int) -> bool:
    """Whether 16-bit gradients are reduced in fp32, as in the other engines; stage 0 keeps them
    in 16 bits anyway."""
    return precision != "fp32" and zero_stage > 0


def _loss_scaling(request: DeepSpeedRequest) -> dict[str, object]:
    """fp16's dynamic loss scale, starting from the plan's value."""
    if request.loss_scale is None:
        return {}
    power = int(math.log2(request.loss_scale))
    return {"fp16.loss_scale": 0, "fp16.initial_scale_power": power}


def unknown_keys(file: JsonFile) -> Iterator[Problem]:
    """Keys that DeepSpeed would silently drop or not accept."""
    for block, known in KNOWN_KEYS.items():
        value = get(file.values, block) if block else file.values
        if value is None:
            continue
        if not isinstance(value, Mapping):
            yield file.problem(block, value, "an object: { … }", "correct or delete it")
            continue
        allowed = f"a key that DeepSpeed knows in {block or 'its config'}"
        if len(known) <= MAX_LISTED:
            allowed = f"{', '.join(sorted(known))} in {block}"
        for name in value:
            if name not in known:
                key = f"{block}.{name}" if block else name
                gone = f"delete it: {REMOVED}" if name in GONE else ""
                fix = gone or did_you_mean(name, known, "delete it")
                yield file.problem(key, value[name], allowed, fix)


def _disagreements(
    file: JsonFile, owned: Mapping[str, object], required: Mapping[str, object]
) -> Iterator[Problem]:
    """Settings that the file and the recipe both state, with different values."""
    for key, value in owned.items():
        found = _stated(file, key)
        if found is not None and value is not None and not same(found, value):
            allowed = f'{json.dumps(value)}, as the recipe says ({OWNED[key]}), or "auto"'
            fix = later_value(OWNED[key], found) or (
                f'write "auto" here, or change {OWNED[key]} in the recipe'
            )
            yield file.problem(key, found, allowed, fix)
    for key, value in required.items():
        found = _stated(file, key)
        if found is not None and not same(found, value):
            allowed = f"{json.dumps(value)}: any other value changes or corrupts the loss"
            yield file.problem(key, found, allowed, "delete it")


def _not_ours_to_run(file: JsonFile, optimizer: OptimizerSection) -> Iterator[Problem]:
    """Blocks that would replace what the recipe decides."""
    if file.values.get("optimizer") is not None and optimizer.kind.whole is not None:
        yield file.problem(
            "optimizer",
            file.values["optimizer"],
            f"nothing with optimizer.name: {optimizer.name}, which DMT itself hands over",
            "delete the block, or set optimizer.name to adamw in the recipe",
        )
    for key, why in _NOT_RUN.items():
        if (found := _stated(file, key)) not in (None, False):
            yield file.problem(key, found, f"nothing: {why}", "delete it")
    if "scheduler" in file.values:
        yield file.problem(
            "scheduler",
            file.values["scheduler"],
            "nothing: the recipe's `schedule` sets the learning rate of every step",
            "delete the block and set `schedule` in the recipe",
        )
    if "bfloat16" in file.values:
        yield file.problem(
            "bfloat16", file.values["bfloat16"], "`bf16`", "rename the block to `bf16`"
        )


def _unfilled(file: JsonFile, owned: Mapping[str, object]) -> Iterator[Problem]:
    """`"auto"` for a setting that the recipe does not fill; DeepSpeed would silently drop
    it."""
    for key in file.lines:
        left = key not in owned and key not in AUTO_IS_A_VALUE
        if left and get(file.values, key) == "auto" and not key.endswith(".nvme_path"):
            yield file.problem(
                key,
                "auto",
                "a value: the recipe does not decide this one",
                "write a value, or delete the key for DeepSpeed's default",
            )


def _missing_folder(file: JsonFile, request: DeepSpeedRequest) -> Iterator[Problem]:
    """NVMe offload for which neither the recipe nor the file names a folder."""
    for block, device, source in _offloads(request.layout):
        stated = request.nvme_path or _stated(file, f"{block}.nvme_path")
        if device == "nvme" and not stated:
            yield Problem(
                "parallel.zero.nvme_path",
                "nothing",
                f"a folder on a fast local disk, because {source} is nvme",
                "set parallel.zero.nvme_path",
            )
            return


def _misread(file: JsonFile, request: DeepSpeedRequest) -> Iterator[Problem]:
    """ZeRO++ that DeepSpeed would compute wrongly or stop at.

    csrc/quantization/pt_binding.cpp (`ds_swizzle_quant`) reads the bits of gradients as fp16.
    """
    if _stated(file, QUANTIZED_GRADIENTS) and request.precision != "fp16":
        allowed = "training.precision: fp16: DeepSpeed reads the bits of all gradients as fp16"
        yield file.problem(QUANTIZED_GRADIENTS, True, allowed, "delete it")
    group, ranks = _stated(file, HPZ), request.layout.dp * request.layout.cp
    if group is not None and (type(group) is not int or group < 1 or ranks % group):
        yield file.problem(
            HPZ, group, f"a divisor of the {ranks} data-parallel ranks", "change or delete it"
        )


def _stated(file: JsonFile, key: str) -> object:
    """The file's value of `key`; None if absent or `"auto"`."""
    value = get(file.values, key)
    return None if value == "auto" else value


_OPTIMIZER_TYPES = {kind.elsewhere.get("deepspeed.json") for _, kind in OPTIMIZERS.items()}


def same(found: object, wanted: object) -> bool:
    """Whether two settings mean the same: 1e-4 is 0.0001, "adamw" is "AdamW", 1 is not true."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return found == wanted or (
            max(abs(found), abs(wanted)) < MAX_FLOAT and math.isclose(found, wanted)
        )
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, str) and isinstance(wanted, str) and wanted in _OPTIMIZER_TYPES:
        return found.lower() == wanted.lower()
    return found == wanted
