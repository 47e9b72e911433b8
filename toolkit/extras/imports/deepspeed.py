"""DeepSpeed's checkpoints of a transformers model: ZeRO 1 to 3, and universal ones.

A rank's file of stage 1 or 2 has, for each group of parameters, a flat fp32 partition with the
same elements of both moments, and states where each parameter's fragment begins in it; the
fragments of a parameter follow one another in the order of the ranks. In stage 3 each parameter
is split into equal parts, the last one padded, and a rank's parts follow one another in the
order of `param_shapes`. Nothing is merged here: each fragment becomes a shard.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.shards import StateShard
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import ForeignState, RecipeModel, Shapes, fragment
from toolkit.extras.imports.pickles import StandIn, load_pickle
from toolkit.models.weights import is_correction_bias
from toolkit.optimizers.base import MOMENTS
from toolkit.system.untrusted import read_bytes, regular_inside

LATEST = "latest"
CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""Plain classes in the files of DeepSpeed 0.14 to 0.19."""
_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class DeepSpeed:
    """See `ForeignCheckpoint`."""

    title = "DeepSpeed ZeRO"
    files = "mp_rank_00_model_states.pt, *_optim_states.pt, or latest, which names their folder"

    def matches(self, folder: Path) -> bool:
        """Whether the folder, or the one that its `latest` names, has the files."""
        return tag_folder(folder, LATEST) is not None

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:  # noqa: ARG002
        """The state of every rank's files."""
        tagged = tag_folder(folder, LATEST)
        assert tagged is not None, "it matches"
        refuse_split(tagged)
        saved = load_pickle(tagged, model_file(tagged) or "", CLASSES)
        ranks = [load_pickle(tagged, name, CLASSES) for name in _rank_files(tagged)]
        states = [rank["optimizer_state_dict"] for rank in ranks]
        _check_count(tagged, states)
        if states[0].get("zero_stage") is not None and stage_of(states[0]) == 3:
            shards = [*_of_stage_3(saved["param_shapes"], states), *_frozen_of_stage_3(tagged)]
        else:
            shards = [*_of_fragments(shapes_of(saved), states), *weights_alone(saved)]
        optimizer = states[0].get("base_optimizer_state") or states[0]["optimizer_state_dict"]
        return foreign_state(saved, shards, optimizer, states[0])


DEEPSPEED = DeepSpeed()


def tag_folder(folder: Path, hint: str) -> Path | None:
    """The folder of one save: this one, or the one that its file `hint` names."""
    if model_file(folder) is None:
        try:
            tag = read_bytes(regular_inside(folder, hint), 4096).decode().strip()
        except (OSError, ValueError):
            return None
        if Path(tag).name != tag:
            raise CheckpointError(f"{folder / hint} names a folder outside: {tag!r:.80}")
        folder = folder / tag
    return None if model_file(folder) is None else folder


def model_file(folder: Path) -> str | None:
    """The file with the counters and the weights that do not train."""
    return next((name for name in _MODEL_FILES if (folder / name).exists()), None)


def refuse_split(folder: Path) -> None:
    """Raise CheckpointError for a model that tensor or expert parallelism splits."""
    if split := [*folder.glob("*mp_rank_01_*"), *folder.glob("*expert_*")]:
        raise CheckpointError(
            f"{folder} is of a model that is split over ranks: {split[0].name}",
            fix="convert it with DeepSpeed's ds_to_universal.py, and import that",
        )


def _rank_files(folder: Path) -> list[str]:
    """The ranks' files, in their order."""
    files = {
        int(match[1]): path.name
        for path in sorted(folder.iterdir())
        if (match := _RANK_FILE.fullmatch(path.name))
    }
    if [*sorted(files)] != [*range(len(files))] or not files:
        raise CheckpointError(f"{folder} has optimizer states of the ranks {sorted(files)}")
    return [files[rank] for rank in sorted(files)]


def _check_count(folder: Path, states: Sequence[Mapping[str, Any]]) -> None:
    stated = states[0]["partition_count"]
    count = max(stated) if isinstance(stated, list) else stated
    if count != len(states):
        raise CheckpointError(f"{folder} has files of {len(states)} ranks, {count} saved it")


def stage_of(state: Mapping[str, Any]) -> int:
    """ZeRO's stage, which is an Enum in the file."""
    stage: Any = state["zero_stage"]
    return int(stage.arguments[0] if isinstance(stage, StandIn) else stage)


def shapes_of(saved: Mapping[str, Any]) -> Shapes:
    """Shape of every parameter that trains, of all groups."""
    return {name: tuple(one) for group in saved["param_shapes"] for name, one in group.items()}


def _of_fragments(shapes: Shapes, states: Sequence[Mapping[str, Any]]) -> Iterator[StateShard]:
    """Stages 1 and 2, and bf16 without ZeRO: every rank's fragments, of all groups."""
    begins = dict.fromkeys(shapes, 0)
    for state in states:
        moments = _moments(state["base_optimizer_state"])
        groups = zip(
            state["single_partition_of_fp32_groups"],
            state["param_slice_mappings"],
            moments,
            strict=True,
        )
        for flat, fragments, states_of in groups:
            values = {"weight": flat, **states_of}
            for name, address in fragments.items():
                first, numel = _address(address)
                here = {one: of[first : first + numel] for one, of in values.items()}
                yield fragment(name, shapes[name], begins[name], here)
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
    for state in states:
        other = [
            k
            for k, v in state.items()
            if isinstance(v, Tensor) and v.dim() and k not in MOMENTS
        ]
        if other or not state.keys() >= {*MOMENTS}:
            raise CheckpointError(
                f"its optimizer keeps {', '.join(sorted(state))}: only AdamW's states are read"
            )
    return [{moment: state[moment] for moment in MOMENTS} for state in states]


def weights_alone(saved: Mapping[str, Any]) -> Iterator[StateShard]:
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


def foreign_state(
    saved: Mapping[str, Any],
    shards: Sequence[StateShard],
    optimizer: Any,
    state: Mapping[str, Any],
) -> ForeignState:
    """The state with the counters of the model's file.

    `optimizer` is torch's state of a rank's optimizer, `state` what holds the loss scaler.
    """
    scaler = vars(state.get("loss_scaler", StandIn()))
    scale = None
    if saved["ds_config"].get("fp16", {}).get("enabled") and "cur_scale" in scaler:
        numbers = {k: v for k, v in scaler.items() if isinstance(v, int | float | bool)}
        scale = {"scale": float(scaler["cur_scale"]), "detail": numbers}
    return ForeignState(
        step=int(saved["global_steps"]),
        optimizer_steps=_updates(
            optimizer, int(saved["global_steps"] - saved["skipped_steps"])
        ),
        shards=shards,
        consumed_samples=int(saved["global_samples"]),
        loss_scale=scale,
        settings=_settings(saved["ds_config"], optimizer),
    )


def _updates(optimizer: Any, counted: int) -> int:
    """Updates that the optimizer has made; of an optimizer that does not say, those counted."""
    states = optimizer
    if not isinstance(optimizer, list):
        states = [*optimizer["state"].values(), *optimizer["param_groups"]]
    stated = {int(one["step"]) for one in states if "step" in one}
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
        found["optimizer.weight_decay"] = max(group["weight_decay"] for group in groups)
        found["optimizer.betas"] = list(groups[0]["betas"])
        found["optimizer.eps"] = groups[0]["eps"]
    return found
