"""The description of a model family, and a config interpreted with it.

A family file defines which keys its Hugging Face config has, the traits of the model that no
key states, which megatron-core model computes the same function, and what megatron-core cannot
express. It is data and arithmetic: no torch, no megatron-core.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.models.config_keys import ROPE_NEEDS, Key
from toolkit.models.families.tensors import TensorMap
from toolkit.models.spec import ModelSpec

Attention = Literal["sdpa", "eager"]
"""transformers' names of attention implementations: torch's scaled_dot_product_attention, and
plain matrix products with a softmax."""

Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Settings:
    """A config with its family's defaults filled in, read by standard key names."""

    family: "Family"
    stated: Mapping[str, object]
    """The config as given."""

    def __getitem__(self, name: str) -> Any:
        """The stated value under any spelling, otherwise the default; None without either."""
        own = self.family.name_of(name)
        key = self.family.keys.get(own)
        for spelling in (own, *self.family.spellings_of(own)):
            if spelling in self.stated:
                value = self.stated[spelling]
                return None if key and key.empty_is_default and value == [] else value
        return key.default if key else None

    @property
    def head_dim(self) -> int:
        """Features of one head; the hidden size divided by the heads if no key states it."""
        stated = self["head_dim"] or self["hidden_size"] // self["num_attention_heads"]
        return int(stated)

    def spelling(self, name: str) -> str:
        """The name of the standard key `name` in a message to this user."""
        return name if name in self.stated else self.family.name_of(name)


@dataclass(frozen=True)
class ChunkedLayers:
    """Attention that differs between layers, as in llama4_text. Layers are counted from 0."""

    size: int
    """Tokens of a chunk."""
    chunked: frozenset[int]
    """Layers whose queries see only their own chunk."""
    normed: frozenset[int]
    """Layers that divide rotated queries and keys by their root mean square."""
    tempered: frozenset[int]
    """Layers that multiply the query at position p of a row by 1 + growth · log(1 + ⌊(p + 1) /
    floor⌋) (arXiv:2501.19399)."""
    floor: int
    growth: float


@dataclass(frozen=True)
class MegatronModel:
    """A model in megatron-core's terms, independent of layout and precision."""

    transformer: Mapping[str, Any]
    """Fields of TransformerConfig as plain values; `activation_func` is the name of the
    activation, a value of `HF_ACTIVATIONS`."""
    gpt: Mapping[str, Any]
    """Arguments of GPTChunk, our GPTModel, as plain values; `vocab_size` is not padded."""
    tensors: tuple[TensorMap, ...]
    """Every tensor; one with `{layer}` in its name stands for one of each layer that has
    it, one with `{expert}` for one of each expert."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input (gpt_neox); in megatron-core's own layer,
    the MLP reads the output of attention."""
    norms: Norms = "before"
    """Where a layer has norms: before attention and MLP, on their outputs, or both."""
    norms_over_width: bool = False
    """Query and key norms are over all heads together, not over each."""
    score_cap: float | None = None
    """c in c · tanh(score / c), the soft-capping of attention scores; None for none."""
    eager: bool = False
    """Attention by matrix products and a softmax, not by torch's fused kernels."""
    logit_cap: float | None = None
    """The same of logits."""
    moe_layers: frozenset[int] = frozenset()
    """Layers with experts instead of a dense MLP."""
    chunked_layers: ChunkedLayers | None = None
    """None: all layers treat queries and keys in the same way, except for windows."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings before the first layer; not of a tied output
    projection."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual."""
    logits_divisor: float = 1.0
    """Divisor of the logits."""
    padding_token: int | None = None
    """Token whose input embedding gets no gradient; None when all are trained."""
    buffers: tuple[TensorMap, ...] = ()
    """Buffers in checkpoints, in addition to the tensors, which are not trained by
    gradients."""

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
    """Its layer in the whole model; None for one outside the layers."""
    expert: int | None
    """Its expert in the whole layer; None for one outside the experts."""


NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""A layer's norms in most families: megatron-core's names inside it, each with the
checkpoint's."""


def all_layers(settings: Settings) -> range:
    """Every layer's number."""
    return range(settings["num_hidden_layers"])


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config keys, its megatron-core model, and traits that no key
    states."""

    model_type: str
    keys: Mapping[str, Key]
    model: Callable[[ModelSpec, Settings], MegatronModel]
    """The map of its tensors, also if the config is `unsupported`."""
    unsupported: Callable[[ModelSpec, Settings], str | None]
    """Why megatron-core cannot compute this config exactly; None when it can."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings that transformers accepts, and the key each one stands for."""
    standard: Mapping[str, str] = field(default_factory=dict)
    """Standard keys that only this family spells differently: transformers knows its own
    spelling alone."""
    strict_heads: bool = False
    """transformers refuses hidden_size % heads != 0 even where head_dim is given."""
    attention: Callable[[Settings], Attention] = lambda _: "sdpa"
    """The fastest implementation that computes this model's attention exactly."""
    shape: Callable[[Settings], ModelSpec] | None = None
    """The model's shape; None if it follows from its keys and the traits below."""
    freezes_padding: bool = True
    """transformers does not train the input embedding of `pad_token_id`."""
    stacked_experts: bool = False
    """Published checkpoints hold a layer's experts in one tensor, as transformers does."""

    # The model's shape, see ModelSpec. A bias that is None here, or False except for the
    # attention output's, follows the config's keys.
    rotary: bool = True
    """Rotary positions, which need an even head size; otherwise a learned table of
    positions."""
    theta: float = 10_000.0
    """The base of rotary positions where no key states it."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The map of rotary settings where no key states it."""
    interleaved: bool = False
    """Rotary positions turn pairs of neighbours."""
    rope_types: tuple[str, ...] = tuple(ROPE_NEEDS)
    """Rotary variants that transformers computes for it."""
    rope_bases: Mapping[str, float] = field(default_factory=dict)
    """If layers of different `layer_types` rotate differently: the default base of each."""
    gated_mlp: bool = True
    mlp_bias: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool | None = None
    query_key_norm: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    """Checkpoints hold the gate and up projection as one tensor."""
    layer_norm: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    """A layer's norms: megatron-core's names inside it, each with the checkpoint's."""
    norms_over_width: bool = False
    """See `MegatronModel.norms_over_width`."""
    wide_norms: bool = False
    """See `ModelSpec.wide_norms`."""
    sliding: Callable[[Settings], Sequence[int]] = all_layers
    """Layers that see only the sliding window, if one is enabled and no `layer_types` given."""

    @property
    def rotary_share(self) -> str:
        """Its key for the rotated share of each head; empty if it has none."""
        names = ("partial_rotary_factor", "rotary_pct")
        return next((name for name in names if name in self.keys), "")

    def name_of(self, key: str) -> str:
        """This family's own spelling of a standard key (`hidden_size` → `n_embd`)."""
        return self.aliases.get(key) or self.standard.get(key, key)

    def spellings_of(self, own: str) -> list[str]:
        """The other spellings of this family's key `own`."""
        return [alias for alias, name in self.aliases.items() if name == own]
