"""GPT-2: learned positions, LayerNorm, biases everywhere, a plain MLP with tanh-gelu.

Its checkpoints store matrices transposed ([in, out]) and query, key and value as one.
"""

from toolkit.models.config_keys import MAP, Key, keys_of
from toolkit.models.families import common
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, fused_qkv, whole
from toolkit.models.spec import ModelSpec

_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "transformer.h.{layer}"


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """GPT-2 as a megatron-core GPTModel."""
    transformer = common.transformer(spec, settings)
    if not settings["scale_attn_weights"]:
        transformer["softmax_scale"] = 1.0
    outer = common.outer_tensors(spec, "transformer.wte", "transformer.ln_f", "transformer.wpe")
    tensors = (*outer, *_layer_tensors(spec))
    return MegatronModel(transformer, common.gpt(spec, settings), tensors)


def _layer_tensors(spec: ModelSpec) -> list[TensorMap]:
    hidden, inner = spec.hidden, spec.intermediate
    attention, mlp = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
    hf_attention, hf_mlp = f"{_HF_LAYER}.attn", f"{_HF_LAYER}.mlp"
    qkv, bias = f"{hf_attention}.c_attn.weight", f"{hf_attention}.c_attn.bias"
    heads = common.heads_of(spec)
    norms = [
        whole(f"{_LAYER}.{norm}.{part}", f"{_HF_LAYER}.{hf_norm}.{part}", hidden)
        for norm, hf_norm in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2"))
        for part in ("weight", "bias")
    ]
    return [
        *norms,
        fused_qkv(f"{attention}.linear_qkv.weight", (qkv, qkv, qkv), heads, hidden,
                  transposed=True),
        fused_qkv(f"{attention}.linear_qkv.bias", (bias, bias, bias), heads, None),
        by_columns(f"{attention}.linear_proj.weight", f"{hf_attention}.c_proj.weight",
                   hidden, hidden, transposed=True),
        whole(f"{attention}.linear_proj.bias", f"{hf_attention}.c_proj.bias", hidden),
        by_rows(f"{mlp}.linear_fc1.weight", f"{hf_mlp}.c_fc.weight", inner, hidden,
                transposed=True),
        by_rows(f"{mlp}.linear_fc1.bias", f"{hf_mlp}.c_fc.bias", inner),
        by_columns(f"{mlp}.linear_fc2.weight", f"{hf_mlp}.c_proj.weight", hidden, inner,
                   transposed=True),
        whole(f"{mlp}.linear_fc2.bias", f"{hf_mlp}.c_proj.bias", hidden),
    ]  # fmt: skip


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this GPT-2; None when it can.

    `reorder_and_upcast_attn` changes only the rounding of transformers' eager attention.
    """
    del spec
    scaled = dropouts = None
    if settings["scale_attn_by_inverse_layer_idx"]:
        scaled = "the Megatron model does not scale attention by the inverse layer number"
    if common.dropout(settings, "embd_pdrop") != common.dropout(settings, "resid_pdrop"):
        dropouts = "megatron-core has one dropout for both: embd_pdrop must equal resid_pdrop"
    return common.first_reason(scaled, dropouts, common.unsupported_activation(settings))


GPT2 = Family(
    "gpt2",
    # n_ctx means n_positions.
    keys_of("gpt2", n_ctx=None, task_specific_params=Key(MAP, nullable=True)),
    model,
    unsupported,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    strict_heads=True,
    freezes_padding=False,
    rotary=False,
    gated_mlp=False,
    mlp_bias=True,
    qkv_bias=True,
    attention_output_bias=True,
    layer_norm=True,
)
