"""A model in megatron-core's terms.

A family is a function from a config, which transformers has completed, and the model's shape to
this. It is data and arithmetic: no torch, no megatron-core.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.models.families.tensors import TensorMap
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class MegatronModel:
    """A model in megatron-core's terms, independent of layout and precision."""

    transformer: Mapping[str, Any]
    """Fields of TransformerConfig as plain values. `activation_func` is the name of the
    activation, a value of `HF_ACTIVATIONS`."""
    gpt: Mapping[str, Any]
    """Arguments of GPTChunk, our GPTModel, as plain values. `vocab_size` is not padded."""
    tensors: tuple[TensorMap, ...]
    """Every tensor. One with `{layer}` in its name stands for one of each layer that has
    it, one with `{expert}` for one of each expert."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input (gpt_neox). In megatron-core's own layer,
    the MLP reads the output of attention."""
    norms: Norms = "before"
    """Where a layer has norms: before attention and MLP, on their outputs, or both."""
    norms_over_width: bool = False
    """Query and key norms are over all heads together, not over each."""
    score_cap: float | None = None
    """c in c · tanh(score / c), the soft-capping of attention scores. None for none."""
    eager: bool = False
    """Attention by matrix products and a softmax, not by torch's fused kernels."""
    logit_cap: float | None = None
    """c in c · tanh(logit / c), the soft-capping of logits. None for none."""
    moe_layers: frozenset[int] = frozenset()
    """Layers with experts instead of a dense MLP."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings before the first layer. A tied output projection has
    none."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual."""
    logits_divisor: float = 1.0
    """Divisor of the logits."""
    padding_token: int | None = None
    """Token whose input embedding gets no gradient. None when all are trained."""
    buffers: tuple[TensorMap, ...] = ()
    """Buffers in checkpoints, in addition to the tensors, which are not trained by
    gradients."""
    unsupported: str | None = None
    """Why megatron-core cannot compute this model exactly. None when it can. Without it, only
    the map of the tensors is valid."""

    def instances(self, *, buffers: bool = False) -> Iterator["Instance"]:
        """Every tensor of the model, layer by layer and expert by expert, and every buffer if
        requested."""
        for tensor in (*self.tensors, *(self.buffers if buffers else ())):
            for layer in self._layers_of(tensor):
                for expert in self._experts_of(tensor):
                    yield Instance(tensor, layer, expert)

    def copies(self, tensor: TensorMap) -> int:
        """How many tensors of the model a map stands for."""
        return len(self._layers_of(tensor)) * len(self._experts_of(tensor))

    def _experts_of(self, tensor: TensorMap) -> list[int | None]:
        if "{expert}" not in tensor.name:
            return [None]
        return list(range(self.transformer["num_moe_experts"]))

    def _layers_of(self, tensor: TensorMap) -> list[int | None]:
        if "{layer}" not in tensor.name:
            return [None]
        layers = range(self.transformer["num_layers"])
        if any(part in tensor.name for part in (".router", ".experts", ".shared_experts")):
            return [layer for layer in layers if layer in self.moe_layers]
        if ".mlp." in tensor.name:
            return [layer for layer in layers if layer not in self.moe_layers]
        return list(layers)


@dataclass(frozen=True)
class Instance:
    """One tensor of the model."""

    tensor: TensorMap
    layer: int | None
    """The layer in the whole model. None for one outside the layers."""
    expert: int | None
    """The expert in the whole layer. None for one outside the experts."""


Family = Callable[[Config, ModelSpec], MegatronModel]
"""The megatron-core model of a `model_type`."""
