"""Read DeepSpeed's universal checkpoints of a transformers model. Each file holds one whole
tensor.

DeepSpeed's script `ds_to_universal` makes such a checkpoint of any ZeRO stage.
"""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.imports.pickles import load_pickle
from toolkit.extras.imports.state import (
    ForeignState,
    RecipeModel,
    StoredTensor,
    count,
    other_optimizer,
    updates,
)

UNIVERSAL = "zero"
"""In a universal checkpoint, the folder with one folder for each parameter."""
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The file with the counters and the configuration."""
TITLE = "DeepSpeed universal"
FILES = f"{UNIVERSAL}/ beside {_MODEL_FILES[0]}"
CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""Plain classes in the files of DeepSpeed 0.14 to 0.19."""


def matches(folder: Path) -> bool:
    """Whether the folder is one save of DeepSpeed."""
    return _model_file(folder) is not None


def _model_file(folder: Path) -> str | None:
    return next((name for name in _MODEL_FILES if (folder / name).exists()), None)


def read(folder: Path, model: RecipeModel) -> ForeignState:
    """The state. Raises CheckpointError for what is damaged, malicious or not supported, and
    for a folder that is not universal yet."""
    if not (folder / UNIVERSAL).is_dir():
        words = ["--input_folder", str(folder), "--output_folder", f"{folder}_universal"]
        raise CheckpointError(
            f"{folder} is split over the ranks that saved it",
            fix="python -m deepspeed.checkpoint.ds_to_universal "
            f"{shlex.join(words)} --inject_missing_state, and import {folder}_universal",
        )
    saved = load_pickle(folder, _model_file(folder) or "", CLASSES)
    optimizer = load_pickle(folder, f"{UNIVERSAL}/optimizer_state.pt", CLASSES)
    _check_optimizer(saved["ds_config"])
    groups = optimizer["param_groups"]
    step, skipped = (count(saved[one], one) for one in ("global_steps", "skipped_steps"))
    counts = {count(one["step"], "step") for one in groups if "step" in one}
    parameters = {}
    for inner in sorted(path for path in (folder / UNIVERSAL).iterdir() if path.is_dir()):
        stored, counted = _parameter(folder, inner)
        # Otherwise a buffer, or the second name of a tied parameter.
        if inner.name in model.parameters or len(stored) > 1:
            parameters[inner.name] = stored
            counts |= counted
    return ForeignState(
        step=step,
        optimizer_steps=updates(counts or {step - skipped}),
        parameters=parameters,
        groups=groups,
        consumed_samples=count(saved["global_samples"], "global_samples"),
    )


def _parameter(folder: Path, inner: Path) -> tuple[dict[str, StoredTensor], set[int]]:
    """Read a parameter's tensors. Where its folder states them, also count its updates."""
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


def _check_optimizer(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the run had another optimizer than AdamW. DeepSpeed's Adam is
    AdamW unless adam_w_mode is false."""
    stated = config.get("optimizer") or {}
    name, parameters = str(stated.get("type") or "AdamW"), stated.get("params") or {}
    if (adam := re.fullmatch("adam(w?)", name, re.IGNORECASE)) is None:
        raise other_optimizer(f"was {name}")
    decouples = adam[1] or parameters.get("adam_w_mode", True)
    if parameters.get("weight_decay") and not decouples:
        raise other_optimizer(f"was {name} with adam_w_mode: false")
