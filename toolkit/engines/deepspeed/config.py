"""From a layout to the JSON that DeepSpeed reads: a preset with every `"auto"` filled.

A preset (or the user's own file) configures how DeepSpeed works: buckets, prefetch, aio. The
recipe decides what to train: the settings of `OWNED`. If the file disagrees with the recipe on
one of them, it is refused, because either could be meant.
"""

import copy
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.engines.deepspeed.keys import (
    ABSENT,
    GONE,
    HPZ,
    KNOWN_KEYS,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAMETERS,
    OWNED,
    QUANTIZED_GRADIENTS,
    REQUIRED,
    ZERO,
)
from toolkit.errors import Problem, RecipeError
from toolkit.layout import Layout, Placement, Stage
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.plan.planner import first_loss_scale
from toolkit.recipe.foreign import value_advice
from toolkit.recipe.schema import Recipe
from toolkit.text.dotted import get, put
from toolkit.text.suggest import did_you_mean

FOLDER = (Path(__file__).parents[2] / "ds_configs").resolve()
"""`ds_configs/` of the checkout (`toolkit/ds_configs` is a link to it). In an installed
package, the same files as package data."""

OFFLOAD_PRESETS = {
    (2, "cpu", "none"): "zero2_offload",
    (3, "cpu", "cpu"): "zero3_offload",
    (3, "nvme", "nvme"): "zero3_nvme",
}
"""By stage, and device of optimizer states and of parameters."""

PRESETS = (*(f"zero{stage}" for stage in range(4)), *OFFLOAD_PRESETS.values(), "zeropp")
"""Names of the shipped presets."""

QUIET: Mapping[str, object] = {"steps_per_print": 1_000_000_000}
"""Written if the file does not state it: the training loop prints progress."""

ADOPTED: Mapping[str, tuple[object, ...]] = {
    f"{ZERO}.stage": get_args(Stage),
    f"{OFFLOAD_OPTIMIZER}.device": get_args(Placement),
    f"{OFFLOAD_PARAMETERS}.device": get_args(Placement),
}
"""Settings that a recipe takes from its own DeepSpeed file, and their values."""

MAX_LISTED = 12
"""For blocks with at most this many keys, an error lists all of them."""

AUTO_IS_A_VALUE = frozenset({"data_types.keep_in_fp32_modules", "pipeline.stages"})
"""Settings for which DeepSpeed itself understands "auto"."""


def preset_path(name: str) -> Path:
    """File of a shipped preset. `name` is one of `PRESETS`."""
    assert name in PRESETS, name
    return FOLDER / f"{name}.json"


def preset_for(layout: Layout) -> str:
    """The preset that a layout starts from when the recipe names none.

    Offload presets are made for one stage each. For another combination of offload, stage and
    devices, it is the stage's plain preset, and the renderer adds the offload blocks.
    """
    offload = (layout.zero_stage, layout.offload_optimizer, layout.offload_parameters)
    return OFFLOAD_PRESETS.get(offload, f"zero{layout.zero_stage}")


def open_config(config: str) -> JsonFile:
    """A preset by its name, or a JSON file.

    Raises RecipeError when it is neither, or not a readable JSON object.
    """
    if config in PRESETS:
        return read_json(preset_path(config))
    if os.path.isfile(config):  # noqa: PTH113 - pathlib raises where a name is too long
        return read_json(Path(config))
    allowed = f"{', '.join(PRESETS)}, or a DeepSpeed JSON file of your own"
    fix = did_you_mean(config, PRESETS, "correct the path")
    raise RecipeError([Problem("parallel.zero.config", config, allowed, fix)])


def adopted(config: str) -> dict[str, object]:
    """Stage and offload that a preset or a file states, by the recipe's keys.

    Raises RecipeError if one of them has no value of DeepSpeed's.
    """
    file, found = open_config(config), {}
    for key, values in ADOPTED.items():
        value = stated(file, key)
        if value is None:
            continue
        if value not in values or type(value) is not type(values[0]):
            *first, last = map(str, values)
            raise RecipeError([file.problem(key, value, f"{', '.join(first)} or {last}")])
        found[OWNED[key]] = value
    return found


def render(recipe: Recipe, layout: Layout) -> dict[str, object]:
    """The complete DeepSpeed config of a run, ready for `deepspeed.initialize`.

    Raises RecipeError with every problem of the file: a value that disagrees with the
    recipe, an unknown key, an `"auto"` that nothing fills, a scheduler, an optimizer
    other than AdamW, or a file that cannot be read.
    """
    file = open_config(recipe.parallel.zero.config or preset_for(layout))
    owned = _owned(recipe, layout)
    problems = [
        *unknown_keys(file),
        *_disagreements(file, recipe, layout, owned),
        *_unusable(file, recipe, layout),
        *_unfilled(file, owned),
        *_missing_folder(file, recipe, layout),
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
        **QUIET,
        **_loss_scaling(recipe),
        **_by_layout(recipe, layout, file),
    }.items():
        if get(file.values, key) is None:
            put(config, key, value)
    return config


def _owned(recipe: Recipe, layout: Layout) -> dict[str, object]:
    """Every setting that the recipe decides, by DeepSpeed's name for it."""
    precision, optimizer = recipe.training.precision, recipe.optimizer
    ranks = layout.dp * layout.cp
    settings: dict[str, object] = {
        # DeepSpeed counts context-parallel ranks as data-parallel ones. Where samples moved,
        # the numbers are those of the plan: their product must hold, and it only logs them.
        "train_batch_size": ranks * layout.micro_batch * layout.gradient_accumulation,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        # DeepSpeed clips at 1.0 unless configured not to.
        "gradient_clipping": optimizer.clip_grad_norm or 0.0,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        "optimizer.type": optimizer.kind.elsewhere.get("deepspeed.json"),
        "optimizer.params.lr": optimizer.learning_rate,
        "optimizer.params.betas": list(optimizer.betas),
        "optimizer.params.eps": optimizer.eps,
        "optimizer.params.weight_decay": optimizer.weight_decay,
        f"{ZERO}.stage": layout.zero_stage,
    }
    if settings["optimizer.type"] is None:  # DeepSpeed gets the optimizer itself
        settings |= {key: None for key in settings if key.startswith("optimizer.")}
    for block, device in _offloads(layout).items():
        folder = recipe.parallel.zero.nvme_path if device == "nvme" else None
        settings[f"{block}.device"] = device
        if folder is not None or device != "nvme":
            settings[f"{block}.nvme_path"] = folder
    return settings


def _offloads(layout: Layout) -> dict[str, Placement]:
    """DeepSpeed's block and the device of each kind of offload."""
    return {
        OFFLOAD_OPTIMIZER: layout.offload_optimizer,
        OFFLOAD_PARAMETERS: layout.offload_parameters,
    }


def _by_layout(recipe: Recipe, layout: Layout, file: JsonFile) -> dict[str, object]:
    """Settings that follow from the layout if the file does not state them."""
    settings: dict[str, object] = {}
    precision = recipe.training.precision
    if recipe.optimizer.kind.whole is None and layout.offload_optimizer == "none":
        # PyTorch's AdamW: DeepSpeed's fused one is compiled at first use.
        settings["optimizer.params.torch_adam"] = True
        params: Any = get(file.values, "optimizer.params") or {}
        if not {"torch_adam", "foreach"} & params.keys():
            # One pass over the shard; PyTorch's default makes about ten on a CPU.
            settings["optimizer.params.fused"] = True
    if precision == "bf16":
        # Otherwise micro batches are summed in bf16.
        settings["data_types.grad_accum_dtype"] = "fp32"
    if precision != "fp32" and not stated(file, QUANTIZED_GRADIENTS):
        # Otherwise the ranks' gradients are summed in 16 bits. Quantization supports only
        # those.
        settings["communication_data_type"] = "fp32"
    return settings


def _loss_scaling(recipe: Recipe) -> dict[str, object]:
    """fp16's dynamic loss scale, starting from the plan's value."""
    scale = first_loss_scale(recipe.training.precision)
    if scale is None:
        return {}
    return {"fp16.loss_scale": 0, "fp16.initial_scale_power": int(math.log2(scale))}


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
        for name in (name for name in value if name not in known):
            key = f"{block}.{name}" if block else name
            fix = did_you_mean(name, known, "delete it")
            if name in GONE:
                fix = "delete it: DeepSpeed has removed it, and refuses it"
            yield file.problem(key, value[name], allowed, fix)


def _disagreements(
    file: JsonFile, recipe: Recipe, layout: Layout, owned: Mapping[str, object]
) -> Iterator[Problem]:
    """Settings that the file and the recipe both state, with different values."""
    batch = layout.global_batch
    batches = batch, batch * layout.cp  # a rendered file counts context ranks, too
    for key, value in owned.items():
        found, accepted = stated(file, key), batches if key == "train_batch_size" else (value,)
        if found is None or value is None or any(same(found, one) for one in accepted):
            continue
        shown = json.dumps(accepted[0])
        allowed = f'{shown}, as the recipe says ({OWNED[key]}), or "auto"'
        fix = value_advice(OWNED[key], found) or (
            f'write "auto" here, or change {OWNED[key]} in the recipe'
        )
        yield file.problem(key, found, allowed, fix)
    for key, value in {**REQUIRED, **_loss_scaling(recipe)}.items():
        found = stated(file, key)
        if found is not None and not same(found, value):
            allowed = f"{json.dumps(value)}: any other value changes or corrupts the loss"
            yield file.problem(key, found, allowed, "delete it")


def _unusable(file: JsonFile, recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    """Settings with which a run would not do what the recipe or the file says."""
    for key, rule in ABSENT.items():
        # DeepSpeed looks into a block of its top level even where that is null.
        if key in file.values or stated(file, key) not in (None, False):
            found = get(file.values, key)
            yield file.problem(key, found, f"nothing: {rule.absent}", rule.fix)
    block, optimizer = file.values.get("optimizer"), recipe.optimizer
    if block is not None and optimizer.kind.whole is not None:
        allowed = f"nothing with optimizer.name: {optimizer.name}, which DMT itself hands over"
        fix = "delete the block, or set optimizer.name to adamw in the recipe"
        yield file.problem("optimizer", block, allowed, fix)
    # csrc/quantization/pt_binding.cpp (`ds_swizzle_quant`) reads the bits of gradients as fp16.
    if stated(file, QUANTIZED_GRADIENTS) and recipe.training.precision != "fp16":
        allowed = "training.precision: fp16: DeepSpeed reads the bits of all gradients as fp16"
        yield file.problem(QUANTIZED_GRADIENTS, True, allowed, "delete it")
    group, ranks = stated(file, HPZ), layout.dp * layout.cp
    if group is not None and (type(group) is not int or group < 1 or ranks % group):
        allowed = f"a divisor of the {ranks} data-parallel ranks"
        yield file.problem(HPZ, group, allowed, "change or delete it")


def _unfilled(file: JsonFile, owned: Mapping[str, object]) -> Iterator[Problem]:
    """`"auto"` for a setting that the recipe does not fill. DeepSpeed would silently drop
    it."""
    for key in file.lines:
        left = key not in owned and key not in AUTO_IS_A_VALUE
        if left and get(file.values, key) == "auto" and not key.endswith(".nvme_path"):
            allowed = "a value: the recipe does not decide this one"
            fix = "write a value, or delete the key for DeepSpeed's default"
            yield file.problem(key, "auto", allowed, fix)


def _missing_folder(file: JsonFile, recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    """NVMe offload for which neither the recipe nor the file names a folder."""
    for block, device in _offloads(layout).items():
        named = recipe.parallel.zero.nvme_path or stated(file, f"{block}.nvme_path")
        if device == "nvme" and not named:
            source = OWNED[f"{block}.device"]
            allowed = f"a folder on a fast local disk, because {source} is nvme"
            key = "parallel.zero.nvme_path"
            yield Problem(key, "nothing", allowed, f"set {key}")
            return


def stated(file: JsonFile, key: str) -> object:
    """The file's value of `key`. None if absent or `"auto"`."""
    value = get(file.values, key)
    return None if value == "auto" else value


_OPTIMIZER_TYPES = [kind.elsewhere.get("deepspeed.json") for _, kind in OPTIMIZERS.items()]


def same(found: object, wanted: object) -> bool:
    """Whether two settings mean the same: 1e-4 is 0.0001, "adamw" is "AdamW", 1 is not true."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return abs(found) < sys.float_info.max and math.isclose(found, wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, str) and wanted in _OPTIMIZER_TYPES:
        return found.lower() == str(wanted).lower()
    return found == wanted
