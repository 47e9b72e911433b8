"""The source of a conversion: a Hugging Face folder or a Megatron checkpoint, read-only."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, DataError
from toolkit.extras.convert.torch_dist import FORMAT, FORMAT_FILE, METADATA
from toolkit.models.config_check import check_config, shown
from toolkit.models.config_keys import is_dropout
from toolkit.models.families import FAMILIES, MegatronModel, megatron_model, unsupported
from toolkit.models.families.base import Family, Instance
from toolkit.models.families.tensors import Block, blocks
from toolkit.system.untrusted import read_bytes, read_json, regular_inside

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron-LM's name for weights without a training step."""
KEPT = "hf"
"""Folder next to the iterations, with the files that only Hugging Face needs."""
NAMES_FILE = "tensors.json"
"""In `KEPT`: the names of the tensors in the Hugging Face files."""
UNMAPPED_FILE = "unmapped.safetensors"
"""In `KEPT`: tensors that the model does not have (buffers)."""
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp",
}  # fmt: skip


@dataclass(frozen=True)
class TensorBlock:
    """A block of a checkpoint tensor and the row at which it begins in a Megatron tensor."""

    instance: Instance
    row: int
    block: Block


@dataclass(frozen=True)
class ConvertibleModel:
    """A model that can be converted."""

    is_megatron: bool
    folder: Path
    """The folder with the weights: Hugging Face's, or an iteration of a Megatron checkpoint."""
    config_file: Path
    companions: Path | None
    """The folder with config.json and the other files that hold no weights; None where only
    the config is known."""
    config: dict[str, Any]
    """The config that transformers reads, without dropout."""
    model: MegatronModel
    notes: tuple[str, ...]
    """What the user should know."""

    @property
    def family(self) -> str:
        """transformers' model_type."""
        return str(self.config["model_type"])

    def tensors(self) -> dict[str, list[TensorBlock]]:
        """The parts of every checkpoint tensor, in the order of Megatron's tensors."""
        parts: dict[str, list[TensorBlock]] = {}
        for instance in self.model.instances(buffers=True):
            row = 0
            for block in whole_blocks(instance):
                parts.setdefault(block.tensor, []).append(TensorBlock(instance, row, block))
                row += len(block.row_numbers)
        return parts


def whole_blocks(instance: Instance) -> list[Block]:
    """The blocks that a whole Megatron tensor consists of, without padding."""
    return blocks(instance.tensor, 0, 1, layer=instance.layer, expert=instance.expert)


def shape_of(parts: Sequence[TensorBlock]) -> tuple[int, ...]:
    """Shape of a checkpoint tensor from all its parts."""
    rows = max(part.block.rows[1] for part in parts)
    columns = parts[0].block.columns
    if columns is None:
        return (rows,)
    return (columns[1], rows) if parts[0].block.transposed else (rows, columns[1])


def companion_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that hold no weights: config, tokenizer, licence."""
    megatron = {NAMES_FILE, TRACKER}
    if _backend(folder) is not None:
        megatron.add(FORMAT_FILE)
    for file in sorted(folder.iterdir()):
        weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        ours = file.name in megatron or file.name.startswith(".")
        if file.is_file() and not weights and not ours:
            yield file


def open_source(src: Path, config_file: Path | None = None) -> ConvertibleModel:
    """Determine the format and the model of `src`.

    Raises DataError or CheckpointError if it has neither format, or is not a model that both
    sides compute identically.
    """
    if not src.is_dir():
        raise DataError(
            f"{src} is not a folder",
            fix="name a folder on this machine (`hf download MODEL --local-dir FOLDER` makes "
            "one of a model on the hub)",
        )
    iteration = iteration_folder(src)
    if iteration is not None:
        path = config_file or _config_beside(src, iteration)
        config, notes = _load_config(path)
        companions = path.parent if config_file is None else None
        return ConvertibleModel(
            True, iteration, path, companions, config, megatron_model(config), notes
        )
    if config_file is not None:
        raise DataError(
            f"{src} is no Megatron checkpoint; a Hugging Face folder has its own config.json",
            fix="leave --config out",
        )
    path = src / "config.json"
    if not path.is_file():
        raise DataError(
            f"{src} holds neither a Hugging Face model (config.json) nor a Megatron checkpoint "
            f"({TRACKER} or {FORMAT_FILE})"
        )
    config, notes = _load_config(path)
    return ConvertibleModel(False, src, path, src, config, megatron_model(config), notes)


def iteration_folder(src: Path) -> Path | None:
    """The folder with the data of a Megatron checkpoint; None if `src` is not one."""
    folder, backend = src, _backend(src)
    if backend is None:
        tracker = src / TRACKER
        if not tracker.is_file():
            return None
        try:
            text = read_bytes(regular_inside(src, TRACKER), 100).decode().strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{tracker} cannot be read: {error}") from error
        if text != RELEASE and not re.fullmatch("[0-9]{1,15}", text):
            raise CheckpointError(f"{tracker} says {text[:40]!r}, neither a step nor {RELEASE}")
        folder = src / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
        backend = _backend(folder)
    if backend != FORMAT["sharded_backend"]:
        found = f"has no {FORMAT_FILE}" if backend is None else f"has the format {backend!r}"
        raise CheckpointError(
            f"{folder} {found}: it is no torch_dist checkpoint",
            fix="save it with Megatron-LM's --ckpt-format torch_dist",
        )
    return folder


def _backend(folder: Path) -> object:
    """The format of a Megatron checkpoint; None for other folders.

    A Hugging Face folder may have its own metadata.json.
    """
    file = folder / FORMAT_FILE
    if not file.is_file():
        return None
    try:
        stated = read_json(file)
    except (OSError, ValueError) as error:
        if not (folder / METADATA).exists():
            return None
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return stated.get("sharded_backend") if isinstance(stated, dict) else None


def _config_beside(src: Path, iteration: Path) -> Path:
    """The Hugging Face config kept with a Megatron checkpoint."""
    for folder in (src / KEPT, iteration.parent / KEPT, src, iteration):
        if (folder / "config.json").is_file():
            return folder / "config.json"
    raise DataError(
        f"{src} does not say which model it holds: it has no config.json",
        fix="pass the model's Hugging Face config with --config config.json",
    )


def _load_config(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config that the Megatron model computes exactly, and notes on omitted settings."""
    try:
        stated = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise DataError(f"{path} is not a config: it holds no JSON object")
    family = FAMILIES.get(str(stated.get("model_type")))
    if family is None:
        found = shown(stated.get("model_type"))
        allowed = ", ".join(sorted(FAMILIES))
        raise DataError(f"{path}: model_type: found {found}; converted are {allowed}")
    stated = _with_rope(stated, family)
    known = {*family.keys, *family.aliases}
    foreign = sorted(set(stated) - known)
    if "quantization_config" in foreign:
        raise DataError(
            f"{path}: quantized weights are not converted", fix="use the unquantized model"
        )
    # A checkpoint does not depend on dropout, and Megatron has fewer kinds of it.
    config = {k: v for k, v in stated.items() if k in known and not is_dropout(k)}
    require_known(path, config)
    if reason := unsupported(config):
        raise DataError(f"{path}: {reason}")
    if not foreign:
        return config, ()
    return config, (f"{path.name}: DMT does not know {', '.join(foreign)}",)


def require_known(path: Path, config: Mapping[str, object]) -> None:
    """Raise DataError with every mistake in the config that is, or is to be, at `path`."""
    if problems := check_config(config):
        lines = [f"{p.key}: found {p.found}; allowed: {p.allowed}" for p in problems]
        raise DataError("\n  ".join([f"{path} does not fit:", *lines]))


def _with_rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The config with rotary keys outside the rotary map moved into it.

    transformers' models do so: `original_max_position_embeddings` replaces what the map
    says, `partial_rotary_factor` applies if the map does not state it. The latter is not read
    in gpt_neox, which has another name for the rotated share.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if name not in family.keys or not isinstance(rope, dict):
        return config
    rest, moved = dict(config), dict(rope)
    name_of_length = "original_max_position_embeddings"
    if name_of_length not in family.keys and (length := rest.pop(name_of_length, None)):
        moved[name_of_length] = length
    if not family.rotary_share:
        share = rest.pop("partial_rotary_factor", None)
        if share not in (None, 1):  # 1: all of each head, as without it
            moved.setdefault("partial_rotary_factor", share)
    return rest | {name: moved} if moved != rope else rest
