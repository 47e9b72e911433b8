"""DeepSpeed's checkpoints of a transformers model: ZeRO 0 to 3, and universal ones.

A rank's file of stage 1 or 2 has, for each group of parameters, a flat fp32 partition with the
same elements of both moments, and states where each parameter's fragment begins in it; the
fragments of a parameter follow one another in the order of the ranks. In stage 3 each parameter
is split into equal parts, the last one padded, and a rank's parts follow one another in the
order of `param_shapes`. Nothing is merged here: each fragment becomes a shard.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.shards import StateShard
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import (
    ForeignState,
    RecipeModel,
    Shapes,
    fragment,
    group_notes,
    group_settings,
    require_adamw,
    whole_number,
)
from toolkit.extras.imports.pickles import StandIn, load_pickle
from toolkit.models.frozen import matching
from toolkit.models.weights import is_correction_bias
from toolkit.optimizers.base import MOMENTS
from toolkit.system.untrusted import read_bytes, regular_inside

LATEST = "latest"
UNIVERSAL = "zero"
"""In a universal checkpoint, the folder with one folder for each parameter."""
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Members of its ZeroStageEnum, which Python 3.11.2 pickles by name."""
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

    title = "DeepSpeed ZeRO"
    files = "mp_rank_00_model_states.pt, *_optim_states.pt, or latest, which names their folder"

    def matches(self, folder: Path) -> bool:
        """Whether the folder, or the one that its `latest` names, has the files."""
        return tag_folder(folder) is not None

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The state of every rank's files."""
        tagged = tag_folder(folder)
        assert tagged is not None, "it matches"
        saved = load_pickle(tagged, model_file(tagged) or "", CLASSES)
        if (tagged / UNIVERSAL).is_dir():
            return _universal(tagged, saved, model)
        if split := [*tagged.glob("*mp_rank_01_*"), *tagged.glob("*expert_*")]:
            raise CheckpointError(
                f"{tagged} is of a model that is split over ranks: {split[0].name}",
                fix="convert it with DeepSpeed's ds_to_universal.py, and import that",
            )
        if saved["optimizer"] is not None:
            return _without_zero(saved, model)
        states = rank_states(tagged)
        if stage_of(states[0]) == 3:
            shards = [*_of_stage_3(saved["param_shapes"], states), *_frozen_of_stage_3(tagged)]
            optimizer = states[0]["optimizer_state_dict"]
        else:
            shards = [*fragments(shapes_of(saved), states), *_weights_alone(saved)]
            optimizer = states[0]["base_optimizer_state"]
        return foreign_state(saved, shards, optimizer, states[0].get("loss_scaler"))


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


def rank_states(folder: Path, part: str = "00") -> list[dict[str, Any]]:
    """The optimizer's state of every data-parallel rank, of one part of the model."""
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{part}_optim_states\.pt")
    files = {
        int(match[1]): path.name
        for path in sorted(folder.iterdir())
        if (match := pattern.fullmatch(path.name))
    }
    if [*sorted(files)] != [*range(len(files))] or not files:
        raise CheckpointError(f"{folder} has optimizer states of the ranks {sorted(files)}")
    ranks = [load_pickle(folder, files[rank], CLASSES) for rank in sorted(files)]
    states = [rank["optimizer_state_dict"] for rank in ranks]
    stated = states[0]["partition_count"]
    count = max(stated) if isinstance(stated, list) else stated
    if count != len(states):
        raise CheckpointError(f"{folder} has files of {len(states)} ranks, {count} saved it")
    return states


def stage_of(state: Mapping[str, Any]) -> int:
    """ZeRO's stage, which is an Enum in the file; 0 for bf16 without ZeRO."""
    stage: Any = state.get("zero_stage", 0)
    value = stage.arguments[-1] if isinstance(stage, StandIn) else stage
    return _STAGES.index(value) if value in _STAGES else int(value)


def shapes_of(saved: Mapping[str, Any]) -> Shapes:
    """Shape of every parameter that trains, of all groups."""
    return {name: tuple(one) for group in saved["param_shapes"] for name, one in group.items()}


def fragments(
    shapes: Shapes,
    states: Sequence[Mapping[str, Any]],
    ours: Callable[[str], str] = lambda name: name,
) -> Iterator[StateShard]:
    """Stages 1 and 2, and bf16 without ZeRO: every rank's fragments, of all groups. `ours` is
    the name that transformers gives a parameter."""
    begins = dict.fromkeys(shapes, 0)
    for state in states:
        moments = _moments(state["base_optimizer_state"])
        groups = zip(
            state["single_partition_of_fp32_groups"],
            state["param_slice_mappings"],
            moments,
            strict=True,
        )
        for flat, mapping, states_of in groups:
            values = {"weight": flat, **states_of}
            for name, address in mapping.items():
                first, numel = _address(address)
                here = {one: of[first : first + numel] for one, of in values.items()}
                yield fragment(ours(name), shapes[name], begins[name], here)
                begins[name] += numel


def _address(address: Any) -> tuple[int, int]:
    """Begin and length of a fragment in a partition."""
    first, numel = address.start, address.numel
    if not isinstance(first, int) or not isinstance(numel, int) or min(first, numel) < 0:
        raise ValueError(f"a fragment at {first!r} of {numel!r} elements")
    return first, numel


def _of_stage_3(
    shapes: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> Iterator[StateShard]:
    """Every rank's part of each parameter, in the sub-groups in which they are updated."""
    for rank, state in enumerate(states):
        moments = _moments(state["optimizer_state_dict"])
        for names, flat, states_of in zip(
            shapes, state["fp32_flat_groups"], moments, strict=True
        ):
            values, first = {"weight": flat, **states_of}, 0
            for name, shape in names.items():
                begin, end, padded = _part_of(tuple(shape), rank, len(states))
                here = {one: of[first : first + end - begin] for one, of in values.items()}
                if end > begin:
                    yield fragment(name, tuple(shape), begin, here)
                first += padded


def _part_of(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int, int]:
    """Begin and end of a rank's part of a parameter in stage 3, and its length with padding."""
    numel = prod(shape)
    padded = ceil(numel / ranks)
    return min(rank * padded, numel), min((rank + 1) * padded, numel), padded


def _moments(optimizer: Any) -> list[dict[str, Tensor]]:
    """AdamW's moments of every group. Raises CheckpointError for other states."""
    states = optimizer
    if not isinstance(optimizer, list):  # which `elastic_checkpoint` writes
        states = [optimizer["state"][number] for number in sorted(optimizer["state"])]
    require_adamw([], states)
    return [{moment: state[moment] for moment in MOMENTS} for state in states]


def _weights_alone(saved: Mapping[str, Any]) -> Iterator[StateShard]:
    """Frozen parameters and correction biases, as the model holds them."""
    buffers, shared = set(saved["buffer_names"]), saved.get("shared_params") or {}
    trained = shapes_of(saved)
    for name, value in saved["module"].items():
        if name in trained or name in shared or value is None:
            continue
        if name not in buffers or is_correction_bias(name):
            yield fragment(name, tuple(value.shape), 0, {"weight": value.reshape(-1)})


def _frozen_of_stage_3(folder: Path) -> Iterator[StateShard]:
    """Frozen parameters, of which each rank's file of the model has a part."""
    names = sorted(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"))
    for rank in range(len(names)):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        saved = load_pickle(folder, name, CLASSES)
        for parameter, values in (saved.get("frozen_param_fragments") or {}).items():
            shape = tuple(saved["frozen_param_shapes"][parameter])
            begin, end, _ = _part_of(shape, rank, len(names))
            if end > begin:
                here = {"weight": values.reshape(-1)[: end - begin]}
                yield fragment(parameter, shape, begin, here)
        if rank == 0:
            biases = {k: v for k, v in saved["module"].items() if is_correction_bias(k)}
            for parameter, value in biases.items():
                yield fragment(parameter, tuple(value.shape), 0, {"weight": value.reshape(-1)})


def _universal(folder: Path, saved: Mapping[str, Any], model: RecipeModel) -> ForeignState:
    """What ds_to_universal.py makes of any stage: whole tensors, one in a file."""
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
    return foreign_state(saved, shards, groups, optimizer.get("loss_scaler"))


def _without_zero(saved: Mapping[str, Any], model: RecipeModel) -> ForeignState:
    """Stage 0: torch's optimizer, which has numbers for the parameters, not names.

    16-bit engines keep fp32 master weights, of which a fused optimizer has one for a group.
    """
    optimizer, module = saved["optimizer"], saved["module"]
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups = [group["params"] for group in inner["param_groups"]]
    moments = dict(zip(sorted(inner["state"]), _moments(inner), strict=True))
    masters = optimizer.get("fp32_groups") or [
        [flat] for flat in optimizer.get("fp32_groups_flat", ())
    ]
    shards, trained = [], set()
    for group, names in enumerate(_names_of_groups(groups, moments, module, model)):
        weights = masters[group] if masters else [module[name] for name in names]
        pieces = [
            {"weight": w, **moments[n]} for w, n in zip(weights, groups[group], strict=True)
        ]
        flat = len(pieces) == 1 and len(names) > 1
        first = 0
        for number, name in enumerate(names):
            shape = tuple(module[name].shape)
            first = first if flat else 0
            values = {
                one: value.reshape(-1)[first : first + prod(shape)]
                for one, value in pieces[0 if flat else number].items()
            }
            shards.append(fragment(name, shape, 0, values))
            first += prod(shape)
        trained |= set(names)
    for name, value in module.items():
        if name in model.parameters and name not in trained:
            shards.append(fragment(name, tuple(value.shape), 0, {"weight": value.reshape(-1)}))
    scaler = StandIn()
    scaler.__setstate__(dict(optimizer))
    return foreign_state(saved, shards, inner, scaler)


def _names_of_groups(
    groups: Sequence[Sequence[int]],
    moments: Mapping[int, Mapping[str, Tensor]],
    module: Mapping[str, Tensor],
    model: RecipeModel,
) -> list[list[str]]:
    """The parameters of each group: all that train, or those with and without weight decay, in
    the order of the model. Raises CheckpointError where these do not have the saved shapes."""
    frozen = matching(model.recipe.model.freeze, model.parameters)
    names = [n for n in model.parameters if n in module and n not in frozen]
    decayed = [n for n in names if len(model.parameters[n]) > 1]
    others = [n for n in names if n not in decayed]
    for candidate in ([names], [decayed, others], [others, decayed]):
        if len(candidate) == len(groups) and all(
            _fits([moments[n]["exp_avg"] for n in group], [module[n] for n in part])
            for group, part in zip(groups, candidate, strict=True)
        ):
            return candidate
    raise CheckpointError(
        "its optimizer states have no names, and their shapes are not those of the parameters "
        "that train, in the model's order",
        fix="state what it froze in model.freeze, or save it with ZeRO stage 1",
    )


def _fits(states: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether states are those of the parameters, one by one or in one flat tensor."""
    if len(states) == 1 and len(parameters) > 1:
        return states[0].numel() == sum(one.numel() for one in parameters)
    return [one.shape for one in states] == [one.shape for one in parameters]


def foreign_state(
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
