"""Qwen3-MoE: qwen3 in which chosen layers hold experts instead of a dense MLP."""

from collections.abc import Mapping

from toolkit.models.config_keys import FLAG, FLOAT, LAYERS, SIZE, Key, without
from toolkit.models.families import common, llama, mixtral, qwen3
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    # Published qwen3_moe configs carry max_window_layers; transformers reads it nowhere.
    **without(qwen3.KEYS, "layer_types"),
    "hidden_size": Key(SIZE, 2048),
    "intermediate_size": Key(SIZE, 6144),
    "num_hidden_layers": Key(SIZE, 24),
    "num_key_value_heads": Key(SIZE, 4),
    "head_dim": Key(SIZE),
    "decoder_sparse_step": Key(SIZE, 1),
    "moe_intermediate_size": Key(SIZE, 768),
    "num_experts_per_tok": Key(SIZE, 8),
    "num_experts": Key(SIZE, 128),
    "norm_topk_prob": Key(FLAG, False),
    "output_router_logits": Key(FLAG, False),
    "router_aux_loss_coef": Key(FLOAT, 0.001),
    "mlp_only_layers": Key(LAYERS, nullable=True),
}


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Qwen3-MoE as a megatron-core GPTModel."""
    experts = _moe_layers(spec, settings)
    transformer = llama.decoder_transformer(spec, settings)
    tensors = [*llama.outer_tensors(spec), *llama.attention_tensors(spec)]
    if experts:
        # Without normalisation the softmax runs over all experts, before the choice.
        transformer["moe_router_pre_softmax"] = not settings["norm_topk_prob"]
        tensors += mixtral.expert_tensors(spec)
    if len(experts) < spec.layers:
        tensors += llama.mlp_tensors(spec)
        if experts:
            transformer["moe_layer_freq"] = [int(i in experts) for i in range(spec.layers)]
    gpt = common.gpt(spec) | common.rotary(settings)
    return MegatronModel(transformer, gpt, tuple(tensors), moe_layers=experts)


def _moe_layers(spec: ModelSpec, settings: Settings) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, less those that the config names as dense."""
    dense, step = settings["mlp_only_layers"] or (), settings["decoder_sparse_step"]
    return frozenset(
        layer for layer in range(spec.layers) if (layer + 1) % step == 0 and layer not in dense
    )


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this qwen3_moe; None when it can."""
    router = None
    if spec.moe_layers and settings["norm_topk_prob"]:
        router = mixtral.unsupported_normalised_router(spec)
    return common.first_reason(router, llama.unsupported(spec, settings))


QWEN3_MOE = Family(
    "qwen3_moe",
    KEYS,
    model,
    unsupported,
    aliases={"num_local_experts": "num_experts"},
    query_key_norm=True,
)
