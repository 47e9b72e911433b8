"""DeepSpeed's universal checkpoints of a transformers model: whole tensors, one in a file.

Its script `ds_to_universal` makes one of any ZeRO stage.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.shards import StateShard
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import (
    ForeignState,
    RecipeModel,
    fragment,
    group_notes,
    group_settings,
    require_adamw,
    whole_number,
)
from toolkit.extras.imports.pickles import StandIn, load_pickle
from toolkit.optimizers.base import MOMENTS
from toolkit.system.untrusted import read_bytes, regular_inside

LATEST = "latest"
UNIVERSAL = "zero"
"""In a universal checkpoint, the folder with one folder for each parameter."""
CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""Plain classes in the files of DeepSpeed 0.14 to 0.19."""
_ADAM = re.compile(r"adam(?P<w>w?)", re.IGNORECASE)
"""DeepSpeed's names of Adam and AdamW."""
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class DeepSpeed:
    """See `ForeignCheckpoint`."""

    title = "DeepSpeed universal"
    files = f"{UNIVERSAL}/ beside {_MODEL_FILES[0]}, or {LATEST}, which names their folder"

    def matches(self, folder: Path) -> bool:
        """Whether the folder, or the one that its `latest` names, is one of DeepSpeed's."""
        return tag_folder(folder) is not None

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The whole state. Raises CheckpointError for one that is not universal yet."""
        tagged = tag_folder(folder)
        assert tagged is not None, "it matches"
        if not (tagged / UNIVERSAL).is_dir():
            words = ["--input_folder", str(tagged), "--output_folder", f"{tagged}_universal"]
            raise CheckpointError(
                f"{tagged} is split over the ranks that saved it",
                fix="python -m deepspeed.checkpoint.ds_to_universal "
                f"{shlex.join(words)} --inject_missing_state, and import {tagged}_universal",
            )
        saved = load_pickle(tagged, model_file(tagged) or "", CLASSES)
        return _universal(tagged, saved, model)


DEEPSPEED = DeepSpeed()


def tag_folder(folder: Path) -> Path | None:
    """The folder of one save: this one, or the one that its file `latest` names."""
    if model_file(folder) is not None:
        return folder
    hint = next((one for one in (LATEST, f"{LATEST}_universal") if (folder / one).exists()), "")
    try:
        tag = read_bytes(regular_inside(folder, hint), 4096).decode().strip()
    except (OSError, ValueError):
        return None
    if not tag or Path(tag).name != tag or tag == ".." or (folder / tag).is_symlink():
        raise CheckpointError(f"{folder / hint} names a folder outside: {tag!r:.80}")
    return None if model_file(folder / tag) is None else folder / tag


def model_file(folder: Path) -> str | None:
    """The file with the counters and the weights that do not train."""
    return next((name for name in _MODEL_FILES if (folder / name).exists()), None)


def _universal(folder: Path, saved: Mapping[str, Any], model: RecipeModel) -> ForeignState:
    shards = []
    for inner in sorted(path for path in (folder / UNIVERSAL).iterdir() if path.is_dir()):
        name = inner.name
        present = [one for one in ("fp32", *MOMENTS) if (inner / f"{one}.pt").exists()]
        if len(present) > 1:
            kept = {path.stem for path in inner.glob("*.pt")} - {"fp32"}
            require_adamw([], [dict.fromkeys(kept)])
        if name not in model.parameters and present == ["fp32"]:
            continue  # a buffer, or the second name of a tied parameter
        content = {
            "weight" if one == "fp32" else one: load_pickle(
                folder, f"{UNIVERSAL}/{name}/{one}.pt"
            )
            for one in present
        }
        values = {one: v if isinstance(v, Tensor) else v["param"] for one, v in content.items()}
        shape = tuple(values["weight"].shape)
        if len(shape) == 1 and name in model.parameters:
            shape = model.parameters[name]  # stage 3's are flat
        flat = {one: value.reshape(-1) for one, value in values.items()}
        shards.append(fragment(name, shape, 0, flat))
    optimizer = load_pickle(folder, f"{UNIVERSAL}/optimizer_state.pt", CLASSES)
    groups = {"state": {}, "param_groups": optimizer["param_groups"]}
    steps = {
        whole_number(load_pickle(folder, str(path.relative_to(folder))), "step")
        for path in (folder / UNIVERSAL).glob("*/step.pt")
    }
    if steps:
        groups["state"] = {number: {"step": step} for number, step in enumerate(steps)}
    return _foreign_state(saved, shards, groups, optimizer.get("loss_scaler"))


def _foreign_state(
    saved: Mapping[str, Any],
    shards: Sequence[StateShard],
    optimizer: Any,
    scaled: object = None,
) -> ForeignState:
    """The state with the counters of the model's file.

    `optimizer` is torch's state of a rank's optimizer, `scaled` the loss scaler.
    """
    groups = () if isinstance(optimizer, list) else optimizer["param_groups"]
    require_adamw(groups, ())
    _require_configured_adamw(saved["ds_config"])
    step = whole_number(saved["global_steps"], "global_steps")
    skipped = whole_number(saved["skipped_steps"], "skipped_steps")
    scaler, scale = vars(scaled) if isinstance(scaled, StandIn) else {}, None
    if saved["ds_config"].get("fp16", {}).get("enabled") and "cur_scale" in scaler:
        numbers = {k: v for k, v in scaler.items() if isinstance(v, int | float | bool)}
        scale = {"scale": float(scaler["cur_scale"]), "detail": numbers}
    return ForeignState(
        step=step,
        optimizer_steps=_updates(optimizer, step - skipped),
        shards=shards,
        consumed_samples=whole_number(saved["global_samples"], "global_samples"),
        loss_scale=scale,
        settings=_settings(saved["ds_config"], optimizer),
        notes=(*_notes(saved, groups),),
    )


def _require_configured_adamw(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if DeepSpeed's configuration states another optimizer.

    Its Adam is AdamW unless adam_w_mode is false.
    """
    stated = config.get("optimizer") or {}
    name, parameters = str(stated.get("type") or "AdamW"), stated.get("params") or {}
    decay = parameters.get("weight_decay", 0)
    match = _ADAM.fullmatch(name)
    is_l2 = match and not match["w"] and not parameters.get("adam_w_mode", True) and decay
    if match is None or is_l2:
        mode = " with adam_w_mode: false" if is_l2 else ""
        raise CheckpointError(
            f"its optimizer was {name}{mode}: only AdamW's states are read",
            fix="another optimizer's weights are a start, with model.init: pretrained",
        )


def _updates(optimizer: Any, counted: int) -> int:
    """Updates that the optimizer has made; of an optimizer that does not say, those counted."""
    states = optimizer
    if not isinstance(optimizer, list):
        states = [*optimizer["state"].values(), *optimizer["param_groups"]]
    stated = {whole_number(one["step"], "step") for one in states if "step" in one}
    if len(stated) > 1:
        raise CheckpointError(f"its parameters were updated {sorted(stated)} times")
    return stated.pop() if stated else counted


def _settings(config: Mapping[str, Any], optimizer: Any) -> dict[str, object]:
    """What the run was configured with, by the recipe's keys."""
    found: dict[str, object] = {}
    if batch := config.get("train_batch_size"):
        found["training.global_batch_size"] = batch
    if clip := config.get("gradient_clipping"):
        found["optimizer.clip_grad_norm"] = clip
    if not isinstance(optimizer, list):
        groups = optimizer["param_groups"]
        found |= group_settings(groups)
    rate = ((config.get("optimizer") or {}).get("params") or {}).get("lr")
    if isinstance(rate, float):
        found["optimizer.learning_rate"] = rate
    stated = {name: config[name] for name in ("fp16", "bf16", "bfloat16") if name in config}
    if stated:
        used = [name for name, section in stated.items() if section.get("enabled")]
        found["training.precision"] = {(): "fp32", ("fp16",): "fp16"}.get((*used,), "bf16")
    return found


def _notes(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What differs from a run of a recipe, or cannot be compared."""
    shapes = [[*map(tuple, one.values())] for one in saved.get("param_shapes") or ()]
    if len(shapes) == len(groups):
        yield from group_notes(groups, shapes)
    if name := (saved["ds_config"].get("scheduler") or {}).get("type"):
        yield f"its schedule was DeepSpeed's {name}, the recipe's schedule applies"
