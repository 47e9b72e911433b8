"""GPT-NeoX's checkpoints: DeepSpeed's, of a pipeline module or a sequential one.

Its layers have numbers: 0 is the embedding, 2 the first of N decoder layers, N + 3 the last
norm, N + 4 the head; 1 and N + 2 have no parameters. The decoder layers have the names and the
fused query, key and value of transformers' gpt_neox. Each part of the pipeline has files of
its own, in which ZeRO 1 splits the fp32 state over the data-parallel ranks.
Source: tools/ckpts/convert_neox_to_hf.py in EleutherAI/gpt-neox.
"""

import re
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path

import torch

from toolkit.checkpoint.shards import StateShard
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import ForeignState, RecipeModel
from toolkit.extras.imports.deepspeed import (
    CLASSES,
    foreign_state,
    fragments,
    rank_states,
    shapes_of,
    tag_folder,
)
from toolkit.extras.imports.pickles import load_pickle
from toolkit.optimizers.base import MOMENTS

_PARAMETER = re.compile(r"(?:sequential\.)?(\d+)\.(.+)")
_HEADS = ("lm_head.weight", "embed_out.weight")
"""transformers' name of the head, of several releases."""
_TIED = "tied_modules.embed."


class GPTNeoX:
    """See `ForeignCheckpoint`."""

    title = "GPT-NeoX"
    files = "layer_*-model_states.pt, or configs/, beside DeepSpeed's files"

    def matches(self, folder: Path) -> bool:
        """Whether DeepSpeed's files are beside a pipeline's layers or NeoX's configs."""
        tagged = tag_folder(folder)
        if tagged is None:
            return False
        return (tagged / "configs").is_dir() or any(tagged.glob("layer_*-model_states.pt"))

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The state of all parts of the pipeline."""
        tagged = tag_folder(folder)
        assert tagged is not None, "it matches"
        if model.config.model_type != "gpt_neox":
            raise CheckpointError(
                f"{tagged} is of GPT-NeoX, the recipe's model is a {model.config.model_type}",
                fix="state its model in model.config, with model_type: gpt_neox",
            )
        head = next((name for name in _HEADS if name in model.parameters), _HEADS[0])
        ours = partial(transformers_name, layers=model.config.num_hidden_layers, head=head)
        shards: list[StateShard] = []
        names: set[str] = set()
        tied: list[StateShard] = []
        saved, states = {}, []
        for path in sorted(tagged.glob("mp_rank_??_model_states.pt")):
            saved = load_pickle(tagged, path.name, CLASSES)
            states = rank_states(tagged, path.name[8:10])
            shapes = shapes_of(saved)
            repeated = names & shapes.keys()
            if twice := sorted(one for one in repeated if not one.startswith(_TIED)):
                raise CheckpointError(
                    f"{tagged} is of a model whose {twice[0]} is split by tensor parallelism, "
                    "which trains the biases of its row-parallel layers differently",
                    fix="continue it with model-parallel-size 1 for a step, and import that",
                )
            names |= shapes.keys()
            of_part = [*fragments(shapes, states, ours)]
            embedding = {ours(one) for one in shapes if one.startswith(_TIED)}
            if repeated:
                again = [one for one in of_part if _is_of(embedding, one)]
                of_part = [one for one in of_part if not _is_of(embedding, one)]
                _require_equal(tied, again)
            tied = tied or [one for one in of_part if _is_of(embedding, one)]
            shards += of_part
        return foreign_state(
            saved, shards, states[0]["base_optimizer_state"], states[0].get("loss_scaler")
        )


GPT_NEOX = GPTNeoX()


def _is_of(parameters: Set[str], shard: StateShard) -> bool:
    return any(block.tensor in parameters for block in shard.blocks)


def _require_equal(first: Sequence[StateShard], again: Sequence[StateShard]) -> None:
    """Raise CheckpointError unless a tied embedding is the same in both parts that hold it."""
    for quantity in ("weight", *MOMENTS):
        values, others = (torch.cat([one.get(quantity) for one in at]) for at in (first, again))
        if not torch.equal(values, others):
            raise CheckpointError(
                f"its first and its last part hold a tied embedding with another {quantity}"
            )


def transformers_name(name: str, layers: int, head: str) -> str:
    """transformers' name of a parameter of a model with so many decoder layers."""
    if name.startswith(_TIED):
        name = f"0.{name.removeprefix(_TIED)}"
    match = _PARAMETER.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name} is no parameter of GPT-NeoX's layers")
    number, rest = int(match[1]), match[2]
    if 2 <= number < layers + 2:
        return f"gpt_neox.layers.{number - 2}.{rest}"
    known = {
        (0, "word_embeddings.weight"): "gpt_neox.embed_in.weight",
        (layers + 3, "norm.weight"): "gpt_neox.final_layer_norm.weight",
        (layers + 3, "norm.bias"): "gpt_neox.final_layer_norm.bias",
        (layers + 4, "final_linear.weight"): head,
    }
    if (number, rest) not in known:
        raise CheckpointError(f"{name} is no parameter of GPT-NeoX with {layers} layers")
    return known[number, rest]
