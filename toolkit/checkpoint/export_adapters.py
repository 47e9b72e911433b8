"""Exports a checkpoint of a run with adapters: a PEFT folder, or merged weights."""

from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from toolkit.checkpoint.checkpoints import locate
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights, pieces
from toolkit.checkpoint.shards import whole_block
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import peft_config
from toolkit.models.adapters.lora import PEFT_PREFIX, PEFT_WEIGHTS, Lora
from toolkit.models.adapters.weights import fingerprint
from toolkit.models.safetensors import TensorToWrite, write_file
from toolkit.models.weights import WeightSource, checkpoint_names
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.removed import without_unset


def saved_lora(manifest: Manifest, config: PretrainedConfig) -> Lora | None:
    """The adapters of a checkpoint of a model with this `config`. None without any."""
    saved = manifest.adapter
    if saved is None:
        return None
    # Earlier releases also stored how the adapters started.
    section = {key: saved[key] for key in AdapterSection.model_fields if key in saved}
    if saved.get("rslora"):  # of earlier releases: scaling was alpha / √rank
        section["alpha"] *= sqrt(section["rank"])
    return Lora.of(AdapterSection.model_validate(section), config.to_dict())


def write_peft(
    folder: Path,
    state: SavedState,
    lora: Lora,
    manifest: Manifest,
    tick: Callable[[int], None],
) -> None:
    """Write `adapter_model.safetensors`, in fp32, and `adapter_config.json`."""
    entries = [
        TensorToWrite(
            f"{PEFT_PREFIX}{lora.peft_names[name]}",
            torch.float32,
            shape,
            partial(state.in_pieces, "weight", name),
        ).telling(tick)
        for name, shape in lora.shapes.items()
    ]
    write_file(folder / PEFT_WEIGHTS, entries)
    written = peft_config(lora, manifest.recipe["model"]["hub"])
    written.inference_mode = True
    written.save_pretrained(folder)


class MergedWeights:
    """The weights of a base with those of its adapters added, in fp32.

    Raises CheckpointError if the base is not the one that the adapters were trained on.
    """

    def __init__(self, state: SavedState, lora: Lora, manifest: Manifest) -> None:
        self.state = state
        self.lora = lora
        self.base = base_weights(manifest)
        check_base(fingerprint(self.base), manifest, state.folder)
        self.shapes = {
            piece.name: piece.shape
            for item in self.base.shapes.items()
            for piece in checkpoint_names(*item)
        }

    def in_pieces(self, quantity: str, tensor: str) -> Iterator[Tensor]:
        """See `SavedState.in_pieces`. `quantity` is `weight`."""
        down, up = self._factors(quantity, tensor)
        for block in pieces(whole_block(tensor, self.shapes[tensor])):
            piece = self.base.read_block(block).float()
            if down is not None:
                piece = piece + self.lora.scaling * (up[slice(*block.rows)] @ down)
            yield piece

    def _factors(self, quantity: str, tensor: str) -> tuple[Tensor | None, Tensor]:
        """Two matrices whose product is added to a stored weight: B and A, or for a transposed
        weight, the transposed A and B. None without an adapter."""
        found = self.lora.factors(tensor)
        if found is None:
            return None, torch.empty(0)
        projection, *blocks = found
        down, up = (self.state.read(quantity, block) for block in blocks)
        return (up.T, down.T) if projection.transposed else (down, up)


def base_weights(manifest: Manifest) -> WeightSource:
    """The initial weights of a run with adapters, from the source in its recipe.

    Raises DataError or CheckpointError if they are missing.
    """
    model = ModelSection.model_validate(without_unset(manifest.recipe["model"], "model"))
    config = hf.build_config(model)
    if model.checkpoint is not None:
        saved = SavedState(locate(Path(model.checkpoint)).folder)
        return SavedWeights(saved, hf.parameter_shapes(config))
    return hf.weight_source(model, config, manifest.recipe["training"]["seed"])


def check_base(base: str, manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError unless the adapters in `folder` were trained on the weights
    with the fingerprint `base`."""
    if base != manifest.base:
        model = manifest.recipe["model"]
        where = model["checkpoint"] or model["hub"] or "the seed"
        raise CheckpointError(
            f"{folder} holds adapters of another base: the weights of {where} have changed",
            fix="restore the weights that the run began with",
        )
