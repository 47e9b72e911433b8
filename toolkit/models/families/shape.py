"""A model's shape, read from its config's keys and its family's traits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from toolkit.models.families.base import MegatronModel, Settings
from toolkit.models.spec import Counted, ModelSpec, ParameterCounts


def shape(settings: Settings) -> ModelSpec:
    """The ModelSpec of a config for which `check_config` found no problem."""
    return (settings.family.shape or sizes)(settings)


def counted(settings: Settings, spec: ModelSpec | None = None) -> ModelSpec:
    """The same for a family with parts that its sizes (`spec`) do not say: counted on its
    tensors."""
    spec = spec or sizes(settings)
    return replace(spec, counted=_count(spec, settings.family.model(spec, settings)))


def _count(spec: ModelSpec, model: MegatronModel) -> Counted:
    """Parameters by part, and 2 FLOPs per weight that a token is multiplied with."""
    sizes: Counter[str] = Counter()
    weights: Counter[str] = Counter()  # without vectors, which multiply nothing
    for tensor in model.tensors:
        part = next(part for word, part in _PARTS.items() if word in tensor.name)
        rows = tensor.rows * model.copies(tensor)
        sizes[part] += rows * (tensor.columns or 1)
        weights[part] += rows * (tensor.columns or 0)
    idle = spec.experts - spec.experts_per_token
    unused = sizes["experts"] * idle // max(spec.experts, 1)
    used = sum(weights[part] for part in ("attention", "mlp", "router"))
    used += weights["experts"] * spec.experts_per_token // max(spec.experts, 1)
    used += spec.vocab * spec.hidden
    parts = {part: sizes[part] for part in _PARTS.values()}
    return Counted(
        ParameterCounts(**parts, inactive_experts=unused), 2.0 * used, spec.score_flops
    )


_PARTS = {
    "word_embeddings": "embedding",
    "position_embeddings": "position_embedding",
    "output_layer": "lm_head",
    "norm": "norms",
    ".router": "router",
    ".mlp.experts": "experts",
    ".mlp": "mlp",
    ".self_attention": "attention",
}
"""A word in megatron-core's name of a tensor → its part of the model; the first that fits."""


def sizes(settings: Settings) -> ModelSpec:
    """What the keys and traits that all families share say."""
    family = settings.family
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    sliding = len(sliding_layers(settings))
    mixtures = len(moe_layers(settings))
    bias, own_bias = bool(settings["attention_bias"]), family.attention_output_bias
    return ModelSpec(
        family=family.model_type,
        layers=settings["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=settings["num_key_value_heads"] or heads,
        head_dim=settings.head_dim,
        intermediate=settings["intermediate_size"] or settings["n_inner"] or 4 * hidden,
        vocab=settings["vocab_size"],
        max_positions=settings["max_position_embeddings"],
        tied_embeddings=settings["tie_word_embeddings"],
        sliding_window=settings["sliding_window"] if sliding else None,
        sliding_layers=sliding,
        experts=settings["num_experts"] or 0,
        experts_per_token=settings["num_experts_per_tok"] or 0,
        expert_intermediate=_expert_intermediate(settings) if mixtures else 0,
        moe_layers=mixtures,
        shared_intermediate=_shared_intermediate(settings) if mixtures else 0,
        gated_mlp=family.gated_mlp,
        learned_positions=not family.rotary,
        qkv_bias=family.qkv_bias or bias or bool(settings["qkv_bias"]),
        attention_output_bias=bias if own_bias is None else own_bias,
        mlp_bias=family.mlp_bias or bool(settings["mlp_bias"]),
        query_key_norm=family.query_key_norm,
        fused_qkv=family.fused_qkv,
        layer_norm=family.layer_norm,
        norms_per_layer=len(family.norms),
        wide_norms=family.wide_norms,
        capped_logits=settings["final_logit_softcapping"] is not None,
        scores="capped" if settings["attn_logit_softcapping"] else "plain",
    )


def sliding_layers(settings: Settings) -> Sequence[int]:
    """Layers whose attention is limited to the window, as the transformers models decide."""
    if settings["sliding_window"] is None or settings["use_sliding_window"] is False:
        return ()
    if (types := settings["layer_types"]) is not None:
        return [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    return settings.family.sliding(settings)


def moe_layers(settings: Settings) -> frozenset[int]:
    """Layers that hold experts: every `decoder_sparse_step`-th (without the key, all), less
    those that the config names as dense."""
    if settings["num_experts"] is None:
        return frozenset()
    step = settings["decoder_sparse_step"] or 1
    layers = range(step - 1, settings["num_hidden_layers"], step)
    return frozenset(layers).difference(settings["mlp_only_layers"] or ())


def _shared_intermediate(settings: Settings) -> int:
    together = (settings["n_shared_experts"] or 0) * (settings["moe_intermediate_size"] or 0)
    return int(settings["shared_expert_intermediate_size"] or together)


def _expert_intermediate(settings: Settings) -> int:
    return int(settings["moe_intermediate_size"] or settings["intermediate_size"])
