"""The key of a distributed checkpoint under which a Megatron tensor is stored, and its position
inside.

megatron-core stacks the layers of a model in one global tensor, and the experts of a layer
in a second axis; if layers differ (some with experts), each has a separate key. Norms have the
names of Transformer Engine's layers, which hold them inside the linear layer that follows.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from toolkit.models.families.base import Instance, MegatronModel

_FUSED_NORMS = (
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


@dataclass(frozen=True)
class TensorLocation:
    """A tensor's place in a checkpoint: a key and the position on its leading axes."""

    key: str
    index: tuple[int, ...]
    """Position on each leading axis (layer, expert)."""
    sizes: tuple[int, ...]
    """Length of each leading axis."""

    @property
    def extra_state(self) -> str | None:
        """Key of the object that megatron-core's linear layers save in addition to their
        weight."""
        if not re.search(r"\.linear_\w+\.weight$", self.key):
            return None
        offset = ".".join(map(str, self.index or (0,)))
        shape = ".".join(map(str, self.sizes or (1,)))
        return f"{self.key.removesuffix('weight')}_extra_state/shard_{offset}_{shape}"


def written_place(model: MegatronModel, instance: Instance) -> TensorLocation:
    """Where megatron-core expects a tensor of this model."""
    stacked = "moe_layer_freq" not in model.transformer
    return next(_places(model, instance, stacked=stacked))


def found_place(
    model: MegatronModel, instance: Instance, keys: Container[str]
) -> TensorLocation | None:
    """Where a checkpoint with these keys holds the tensor; None if it does not."""
    for stacked in (True, False):
        for place in _places(model, instance, stacked=stacked):
            if place.key in keys:
                return place
    return None


def _places(
    model: MegatronModel, instance: Instance, *, stacked: bool
) -> Iterator[TensorLocation]:
    """Possible positions of the tensor, the one that DMT writes first."""
    key = instance.tensor.name
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer, expert = instance.layer, instance.expert
    if layer is not None and stacked:
        key = key.replace("layers.{layer}.", "layers.")
        index, sizes = (layer,), (model.transformer["num_layers"],)
    key = key.replace("{layer}", str(layer))
    for plain, fused in _FUSED_NORMS:
        if plain in key and _is_fused(model, layer, plain):
            yield TensorLocation(key.replace(plain, fused), index, sizes)
    if expert is not None:
        one_each = key.replace("local_experts.{expert}", f"experts.{expert}")
        key = key.replace("local_experts.{expert}.", "experts.")
        experts = model.transformer["num_moe_experts"]
        yield TensorLocation(key, (*index, expert), (*sizes, experts))
        key = one_each
    yield TensorLocation(key, index, sizes)


def _is_fused(model: MegatronModel, layer: int | None, norm: str) -> bool:
    """Whether a single linear layer follows this norm and can hold it."""
    if "mlp" in norm:
        return layer not in model.moe_layers
    latent = "multi_latent_attention" in model.transformer
    return latent != ("input" in norm)
