"""The model as the planner sees it: shape, parameters, FLOPs.

Does not import torch: `dmt check` and `dmt plan` use these numbers. Parameter counts are exact
(tested against the real transformers models). FLOPs count every matrix product of one forward
pass.
"""

from dataclasses import dataclass
from typing import Literal

Scores = Literal["plain", "capped", "sinks"]


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by part. Biases are counted with their matrix."""

    embedding: int
    """Token embedding, vocab × hidden."""
    position_embedding: int
    """Learned positions, max_positions × hidden. 0 with rotary positions."""
    attention: int
    """Query, key, value and output projections of all layers."""
    mlp: int
    """Dense feed-forward matrices of all layers."""
    router: int
    """Expert routers of all mixture-of-experts layers."""
    experts: int
    """All experts of all mixture-of-experts layers."""
    inactive_experts: int
    """The share of `experts` that one token does not use."""
    norms: int
    """Norm weights and biases, the final norm and query/key norms included."""
    lm_head: int
    """Output projection, vocab × hidden. 0 when tied to the embedding."""

    @property
    def total(self) -> int:
        """All parameters, tied weights counted once."""
        return (
            self.embedding + self.position_embedding + self.attention + self.mlp
            + self.router + self.experts + self.norms + self.lm_head
        )  # fmt: skip

    @property
    def active(self) -> int:
        """Parameters used by one token: all except the experts that are not chosen."""
        return self.total - self.inactive_experts


@dataclass(frozen=True)
class FrozenParameters:
    """Frozen parameters, by part."""

    embedding: int
    position_embedding: int
    lm_head: int
    final_norm: int
    layers: tuple[int, ...]
    """Attention and dense MLP of each layer, which tensor parallel splits."""
    whole: tuple[int, ...]
    """Norms and routers of each layer, which every tensor-parallel rank holds."""
    experts: tuple[int, ...]
    """Experts of each layer."""
    first_trained: int
    """The first layer with a parameter that trains, 0 if an embedding does: the backward pass
    goes no further. The number of layers if there is none."""

    @property
    def total(self) -> int:
        """All of them."""
        ends = self.embedding + self.position_embedding + self.lm_head + self.final_norm
        return ends + sum(self.layers) + sum(self.whole) + sum(self.experts)


@dataclass(frozen=True)
class AdapterParameters:
    """Parameters of the adapters of all layers."""

    split: int
    """Parameters outside of experts that tensor parallel splits."""
    whole: int
    """Parameters that every tensor-parallel rank holds."""
    experts_split: int = 0
    """Parameters of experts that tensor parallel splits where it splits experts."""
    experts_whole: int = 0

    @property
    def experts(self) -> int:
        """All of experts."""
        return self.experts_split + self.experts_whole


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only language model. Sizes are in elements."""

    family: str
    """transformers' `model_type`."""
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads. Fewer than `heads` with grouped-query attention."""
    head_dim: int
    """Size of one head. Heads · head_dim need not equal `hidden`."""
    intermediate: int
    """Inner size of a dense MLP."""
    vocab: int
    max_positions: int
    """Longest sequence that the config states. A hard limit for learned positions."""
    parameters: ParameterCounts
    """Exact parameter counts by part."""
    flops: float
    """FLOPs of a forward pass per token, without attention's scores."""
    score_flops: float
    """Forward FLOPs per query and key in all layers: the score, and its product with the
    value."""
    assumed: bool = False
    """The FLOPs are assumed: the model cannot run without storage."""
    tied_embeddings: bool = False
    """Output projection shares the token embedding."""
    sliding_window: int | None = None
    """Keys that a query of a sliding-window layer sees, itself included."""
    sliding_layers: int = 0
    """Layers whose attention is limited to the window. The others see everything."""
    chunked: bool = False
    """Chunks instead of a sliding window: a query sees the previous positions of its own
    chunk."""
    experts: int = 0
    """Experts of a mixture-of-experts layer. 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """Inner size of one expert."""
    moe_layers: int = 0
    """Layers with experts. The others have a dense MLP."""
    shared_intermediate: int = 0
    """Inner size of the shared experts together, in each layer with experts."""
    every_expert: bool = False
    """transformers' own model computes every expert on every token, on zeros if the token did
    not choose it."""
    latent: int = 0
    """Sizes of the latent vectors of queries and of keys and values, together. 0 where these
    are projected at once."""
    gated_mlp: bool = True
    """Three matrices (gate, up, down) instead of two."""
    learned_positions: bool = False
    """A position embedding table instead of rotary positions."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    """A norm over each query and key head."""
    fused_qkv: bool = False
    """transformers' queries, keys and values are views of one product."""
    layer_norm: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    norms_per_layer: int = 2
    wide_norms: bool = False
    """Norms multiply with their weight, 1 + w, before they leave fp32."""
    capped_logits: bool = False
    """Logits are soft-capped."""
    scores: Scores = "plain"
    """What attention's scores are besides scaled and masked: soft-capped, or with sinks."""
    frozen: FrozenParameters | None = None
    """The parameters frozen by `model.freeze`. None: everything trains."""
    adapters: AdapterParameters | None = None
    """The adapters. With them, nothing else trains."""
    generic: bool = False
    """Without a map to megatron-core's model."""

    @property
    def grouped(self) -> bool:
        """Does a head of keys and values serve several queries' heads?"""
        return self.kv_heads < self.heads

    @property
    def total(self) -> int:
        """All parameters, adapters included."""
        return self.parameters.total + self._adapter_parameters

    @property
    def _adapter_parameters(self) -> int:
        own = self.adapters
        return 0 if own is None else own.split + own.whole + own.experts

    @property
    def trainable(self) -> int:
        """Parameters that train."""
        if self.adapters is not None:
            return self._adapter_parameters
        return self.parameters.total - (self.frozen.total if self.frozen else 0)

    @property
    def reached(self) -> float:
        """Share of the layers that the backward pass goes through."""
        if self.frozen is None or self.adapters is not None:
            return 1.0
        return 1 - self.frozen.first_trained / self.layers

    @property
    def trained_products(self) -> float:
        """Share of the layers' products whose weights' gradients are computed: none of a
        frozen base. Adapters' own, of rank 8 to 64, are not counted."""
        if self.adapters is not None:
            return 0.0
        if self.frozen is None:
            return 1.0
        parts, chosen = self.parameters, self.experts_per_token / max(1, self.experts)
        frozen = sum(self.frozen.layers) + chosen * sum(self.frozen.experts)
        return 1 - frozen / (parts.attention + parts.mlp + chosen * parts.experts)

    @property
    def trained_embedding(self) -> bool:
        """Whether the token embedding trains."""
        return self.adapters is None and not (self.frozen and self.frozen.embedding)

    @property
    def trained_head(self) -> bool:
        """Whether the output projection trains."""
        if self.tied_embeddings:
            return self.trained_embedding
        return self.adapters is None and not (self.frozen and self.frozen.lm_head)

    def flops_per_token(self, sequence_length: int, *, causal: bool) -> float:
        """Training FLOPs per token (forward and backward), attention counted as masked, or in
        full: the convention of the Megatron papers and of NVIDIA's published figures.

        Matrix products of the forward pass, and in the backward pass one for the gradient of
        each input and one for that of each weight that trains: three times the forward pass
        where all do. Recomputed activations are not counted, so this is the numerator of MFU,
        not of HFU.
        """
        forward = self.forward_flops_per_token(sequence_length, causal=causal)
        if self.frozen is None and self.adapters is None:
            return 3 * forward
        head = 2.0 * self.vocab * self.hidden
        scores = forward - self.forward_flops_per_token(1, causal=causal) + self.score_flops
        products = forward - head - scores
        backward = self.reached * (products + 2 * scores) + self.trained_products * products
        return forward + backward + head * ((self.reached > 0) + self.trained_head)

    def forward_flops_per_token(self, sequence_length: int, *, causal: bool) -> float:
        """Matrix products of one forward pass, 2 FLOPs per multiply-add.

        2 FLOPs per weight and token for every projection, the chosen experts, the router
        and the logits; 4 · heads · head_dim per query and key for the scores and their
        product with the values. Norms, biases, activations, softmax, rotary positions and
        the embedding lookup are not counted. With `causal`, a query is multiplied with the keys
        that the mask and the window leave (the mean over the queries); without, with every key,
        or in sliding-window layers with `sliding_window` keys. Source: PaLM (arXiv:2204.02311),
        appendix B; Narayanan et al. 2021 (arXiv:2104.04473), appendix; Korthikanti et al. 2022
        (arXiv:2205.05198), appendix A, whose 72·B·L·s·h²(1 + s/6h + v/12hL) is three times
        this with full attention, a 4h MLP and no grouped queries.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be 1 or more, found {sequence_length}")
        limited, whole = (
            self._keys_per_query(sequence_length, window, causal=causal)
            for window in (self.sliding_window, None)
        )
        keys = self.sliding_layers * limited + (self.layers - self.sliding_layers) * whole
        return self.flops + self.score_flops * keys / self.layers

    def _keys_per_query(self, length: int, window: int | None, *, causal: bool) -> float:
        """Mean number of keys that a query is multiplied with in a layer with this `window`
        (None: without one), over a sequence of `length` tokens."""
        span = min(length, window or length)
        if not causal:
            return span
        chunks, rest = divmod(length, span) if self.chunked else (1, length - span)
        # The first `span` queries see 1, 2, …, span keys; of later ones every one sees `span`,
        # or those of a later chunk begin with one again.
        later = rest * (rest + 1) / 2 if self.chunked else rest * span
        return (chunks * span * (span + 1) / 2 + later) / length
