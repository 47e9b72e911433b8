"""GPT-NeoX (Pythia): LayerNorm, biases everywhere, rotary positions on a share of each head.

Attention and MLP both read the layer's input (`use_parallel_residual`). Query, key and value
are stored as one matrix, head after head, which is Megatron's own order.
"""

from collections.abc import Mapping

from toolkit.models.config_keys import (
    ACTIVATION,
    DROPOUT,
    FLAG,
    GENERIC,
    POSITIVE,
    POSITIVE_FLOAT,
    ROPE,
    SIZE,
    TOKEN,
    TOKENS,
    UNIT_FLOAT,
    Key,
)
from toolkit.models.families import common
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **GENERIC,
    **ROPE,
    "vocab_size": Key(SIZE, 50432),
    "hidden_size": Key(SIZE, 6144),
    "num_hidden_layers": Key(SIZE, 44),
    "num_attention_heads": Key(SIZE, 64),
    "intermediate_size": Key(SIZE, 24576),
    "hidden_act": Key(ACTIVATION, "gelu"),
    "rotary_pct": Key(UNIT_FLOAT, 0.25),
    "rotary_emb_base": Key(POSITIVE, 10000),
    "attention_dropout": Key(DROPOUT, 0.0),
    "hidden_dropout": Key(DROPOUT, 0.0),
    "classifier_dropout": Key(DROPOUT, 0.1),
    "max_position_embeddings": Key(SIZE, 2048),
    "layer_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "bos_token_id": Key(TOKEN, 0, nullable=True),
    "eos_token_id": Key(TOKENS, 2, nullable=True),
    "use_parallel_residual": Key(FLAG, True),
    "attention_bias": Key(FLAG, True),
    "is_decoder": Key(FLAG, False),
}

_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "gpt_neox.layers.{layer}"


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """GPT-NeoX as a megatron-core GPTModel, with a layer of ours for the parallel residual."""
    transformer = common.transformer(spec) | {
        "layernorm_epsilon": settings["layer_norm_eps"],
        "activation_func": common.HF_ACTIVATIONS.get(settings["hidden_act"]),
        "attention_dropout": common.dropout(settings, "attention_dropout"),
        "hidden_dropout": common.dropout(settings, "hidden_dropout"),
    }
    outer = common.outer_tensors(spec, "gpt_neox.embed_in", "gpt_neox.final_layer_norm")
    theta, share = settings["rotary_emb_base"], settings["rotary_pct"]
    return MegatronModel(
        transformer,
        common.gpt(spec) | common.rotary(settings, theta=theta, share=share),
        (*outer, *_layer_tensors(spec)),
        parallel_residual=settings["use_parallel_residual"],
    )


def _layer_tensors(spec: ModelSpec) -> list[TensorMap]:
    hidden, inner = spec.hidden, spec.intermediate
    attention, mlp = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
    hf_attention, hf_mlp = f"{_HF_LAYER}.attention", f"{_HF_LAYER}.mlp"
    qkv, up, down = (f"{hf_attention}.query_key_value", f"{hf_mlp}.dense_h_to_4h",
                     f"{hf_mlp}.dense_4h_to_h")  # fmt: skip
    norms = [
        whole(f"{_LAYER}.{norm}.{part}", f"{_HF_LAYER}.{hf_norm}.{part}", hidden)
        for norm, hf_norm in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        )
        for part in ("weight", "bias")
    ]
    biases = [
        by_rows(f"{attention}.linear_qkv.bias", f"{qkv}.bias", 3 * hidden),
        whole(f"{attention}.linear_proj.bias", f"{hf_attention}.dense.bias", hidden),
    ]
    return [
        *norms,
        by_rows(f"{attention}.linear_qkv.weight", f"{qkv}.weight", 3 * hidden, hidden),
        by_columns(f"{attention}.linear_proj.weight", f"{hf_attention}.dense.weight", hidden,
                   hidden),
        *(biases if spec.qkv_bias else ()),
        by_rows(f"{mlp}.linear_fc1.weight", f"{up}.weight", inner, hidden),
        by_rows(f"{mlp}.linear_fc1.bias", f"{up}.bias", inner),
        by_columns(f"{mlp}.linear_fc2.weight", f"{down}.weight", hidden, inner),
        whole(f"{mlp}.linear_fc2.bias", f"{down}.bias", hidden),
    ]  # fmt: skip


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this GPT-NeoX; None when it can."""
    theta = None
    if settings["rope_theta"] not in (None, settings["rotary_emb_base"]):
        theta = (
            "transformers' gpt_neox reads rotary_emb_base, not rope_theta; remove the latter"
        )
    return common.first_reason(
        theta,
        common.unsupported_biases(spec),
        common.unsupported_activation(settings["hidden_act"]),
    )


GPT_NEOX = Family(
    "gpt_neox",
    KEYS,
    model,
    unsupported,
    strict_heads=True,
    freezes_padding=False,
    published_names=((r"^lm_head\.", "embed_out."),),
    gated_mlp=False,
    mlp_bias=True,
    fused_qkv=True,
    layer_norm=True,
)
