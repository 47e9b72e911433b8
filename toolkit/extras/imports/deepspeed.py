"""DeepSpeed's universal checkpoints of a transformers model: whole tensors, one in a file.

Its script `ds_to_universal` makes one of any ZeRO stage.
"""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.imports.pickles import StandIn, load_pickle
from toolkit.extras.imports.state import (
    SAMPLES,
    ForeignState,
    RecipeModel,
    StoredTensor,
    adamw_settings,
    count,
    other_optimizer,
    updates,
)
from toolkit.system.untrusted import read_bytes, regular_inside

LATEST = "latest"
UNIVERSAL = "zero"
"""In a universal checkpoint, the folder with one folder for each parameter."""
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The file with the counters and the configuration."""
TITLE = "DeepSpeed universal"
FILES = f"{UNIVERSAL}/ beside {_MODEL_FILES[0]}, or {LATEST}, which names their folder"
CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""Plain classes in the files of DeepSpeed 0.14 to 0.19."""


def matches(folder: Path) -> bool:
    """Whether the folder, or the one that its file `latest` names, is DeepSpeed's."""
    return _tag_folder(folder) is not None


def _tag_folder(folder: Path) -> Path | None:
    """The folder of one save: this one, or the one that its file `latest` names."""
    if _model_file(folder) is not None:
        return folder
    hint = next((one for one in (LATEST, f"{LATEST}_universal") if (folder / one).exists()), "")
    try:
        tag = read_bytes(regular_inside(folder, hint), 4096).decode().strip()
    except (OSError, ValueError):
        return None
    if not tag or Path(tag).name != tag or tag == ".." or (folder / tag).is_symlink():
        raise CheckpointError(f"{folder / hint} names a folder outside: {tag!r:.80}")
    return None if _model_file(folder / tag) is None else folder / tag


def _model_file(folder: Path) -> str | None:
    return next((name for name in _MODEL_FILES if (folder / name).exists()), None)


def read(folder: Path, model: RecipeModel) -> ForeignState:
    """The state. Raises CheckpointError for what is damaged, malicious or not supported, and
    for a folder that is not universal yet."""
    tagged = _tag_folder(folder)
    assert tagged is not None, "it matches"
    if not (tagged / UNIVERSAL).is_dir():
        words = ["--input_folder", str(tagged), "--output_folder", f"{tagged}_universal"]
        raise CheckpointError(
            f"{tagged} is split over the ranks that saved it",
            fix="python -m deepspeed.checkpoint.ds_to_universal "
            f"{shlex.join(words)} --inject_missing_state, and import {tagged}_universal",
        )
    saved = load_pickle(tagged, _model_file(tagged) or "", CLASSES)
    optimizer = load_pickle(tagged, f"{UNIVERSAL}/optimizer_state.pt", CLASSES)
    config, groups = saved["ds_config"], optimizer["param_groups"]
    step, skipped = (count(saved[one], one) for one in ("global_steps", "skipped_steps"))
    counts = {count(one["step"], "step") for one in groups if "step" in one}
    parameters = {}
    for inner in sorted(path for path in (tagged / UNIVERSAL).iterdir() if path.is_dir()):
        stored, counted = _parameter(tagged, inner)
        # Otherwise a buffer, or the second name of a tied parameter.
        if inner.name in model.parameters or len(stored) > 1:
            parameters[inner.name] = stored
            counts |= counted
    return ForeignState(
        step=step,
        optimizer_steps=updates(counts or {step - skipped}),
        parameters=parameters,
        settings=_settings(config, groups),
        consumed_samples=count(saved["global_samples"], "global_samples", SAMPLES),
        loss_scale=_loss_scale(config, optimizer.get("loss_scaler")),
    )


def _parameter(folder: Path, inner: Path) -> tuple[dict[str, StoredTensor], set[int]]:
    """A parameter's tensors, and how often it was updated, where its folder says so."""
    found = {
        path.stem: load_pickle(folder, f"{UNIVERSAL}/{inner.name}/{path.name}")
        for path in inner.glob("*.pt")
    }
    counts = {count(found.pop("step"), "step")} if "step" in found else set()
    stored = {}
    for quantity, content in {"weight": found.pop("fp32"), **found}.items():
        values: Tensor = content if isinstance(content, Tensor) else content["param"]
        stored[quantity] = StoredTensor(tuple(values.shape), partial(Tensor.detach, values))
    return stored, counts


def _loss_scale(config: Mapping[str, Any], scaler: object) -> dict[str, Any] | None:
    state = vars(scaler) if isinstance(scaler, StandIn) else {}
    if not (config.get("fp16") or {}).get("enabled") or "cur_scale" not in state:
        return None
    numbers = {k: v for k, v in state.items() if isinstance(v, int | float | bool)}
    return {"scale": float(state["cur_scale"]), "detail": numbers}


def _settings(
    config: Mapping[str, Any], groups: list[Mapping[str, Any]]
) -> dict[str, list[object]]:
    """What the run was configured with, by the recipe's keys: what the configuration leaves out
    has DeepSpeed's default. Raises CheckpointError for another optimizer; DeepSpeed's Adam is
    AdamW unless adam_w_mode is false."""
    found, stated = adamw_settings(groups), config.get("optimizer") or {}
    name, parameters = str(stated.get("type") or "AdamW"), stated.get("params") or {}
    if (adam := re.fullmatch("adam(w?)", name, re.IGNORECASE)) is None:
        raise other_optimizer(f"was {name}")
    decouples = adam[1] or parameters.get("adam_w_mode", True)
    if parameters.get("weight_decay") and not decouples:
        raise other_optimizer(f"was {name} with adam_w_mode: false")
    schedule = (config.get("scheduler") or {}).get("type")
    if isinstance(rate := parameters.get("lr"), float):
        found["optimizer.learning_rate"] = [rate]
    elif schedule and not any("initial_lr" in group for group in groups):
        found.pop("optimizer.learning_rate", None)  # it is that of the last step
    if schedule:
        found["schedule.name"] = [f"{schedule} of DeepSpeed"]
    if isinstance(batch := config.get("train_batch_size"), int):
        found["training.global_batch_size"] = [batch]
    found["optimizer.clip_grad_norm"] = [config.get("gradient_clipping") or None]
    names = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    used = [names[one] for one in names if (config.get(one) or {}).get("enabled")]
    found["training.precision"] = [used[0] if used else "fp32"]
    return found
