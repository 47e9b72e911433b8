"""GPT-2: learned positions, LayerNorm, biases everywhere, a plain MLP with tanh-gelu.

Its checkpoints store matrices transposed ([in, out]) and query, key and value as one.
"""

from toolkit.models.families import common
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, fused_qkv, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "transformer.h.{layer}"


def gpt2(config: Config, spec: ModelSpec) -> MegatronModel:
    """GPT-2 as a megatron-core GPTModel.

    `reorder_and_upcast_attn` changes only the rounding of transformers' eager attention.
    """
    transformer = common.transformer(config, spec)
    if not config["scale_attn_weights"]:
        transformer["softmax_scale"] = 1.0
    reason = None
    if config["scale_attn_by_inverse_layer_idx"]:
        reason = "the Megatron model does not scale attention by the inverse layer number"
    elif config["embd_pdrop"] != config["resid_pdrop"]:
        reason = "megatron-core has one dropout for both: embd_pdrop must equal resid_pdrop"
    outer = common.outer_tensors(spec, "transformer.wte", "transformer.ln_f", "transformer.wpe")
    tensors = (*outer, *_layer_tensors(spec))
    reason = reason or common.activation_reason(config)
    gpt = common.gpt(config, spec)
    return MegatronModel(transformer, gpt, tensors, unsupported=reason)


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
