"""GPT-NeoX (Pythia): LayerNorm, biases everywhere, rotary positions on a share of each head.

Attention and MLP both read the layer's input (`use_parallel_residual`). Query, key and value
are stored as one matrix, head after head, which is Megatron's own order.
"""

from toolkit.models.families import common
from toolkit.models.families.base import NORMS, MegatronModel
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "gpt_neox.layers.{layer}"


def gpt_neox(config: Config, spec: ModelSpec) -> MegatronModel:
    """GPT-NeoX as a megatron-core GPTModel, with a layer of ours for the parallel residual."""
    outer = common.outer_tensors(spec, "gpt_neox.embed_in", "gpt_neox.final_layer_norm")
    return MegatronModel(
        common.transformer(config, spec),
        common.gpt(config, spec),
        (*outer, *_layer_tensors(spec)),
        parallel_residual=config["use_parallel_residual"],
        unsupported=common.bias_reason(spec) or common.activation_reason(config),
    )


def _layer_tensors(spec: ModelSpec) -> list[TensorMap]:
    hidden, inner = spec.hidden, spec.intermediate
    attention, mlp = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
    hf_attention, hf_mlp = f"{_HF_LAYER}.attention", f"{_HF_LAYER}.mlp"
    qkv, up, down = (f"{hf_attention}.query_key_value", f"{hf_mlp}.dense_h_to_4h",
                     f"{hf_mlp}.dense_4h_to_h")  # fmt: skip
    norms = [
        whole(f"{_LAYER}.{norm}.{part}", f"{_HF_LAYER}.{hf_norm}.{part}", hidden)
        for norm, hf_norm in NORMS.items()
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
