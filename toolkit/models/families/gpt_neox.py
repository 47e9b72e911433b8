"""GPT-NeoX (Pythia): LayerNorm, biases everywhere, rotary positions on a share of each head.

Attention and MLP both read the layer's input (`use_parallel_residual`). Query, key and value
are stored as one matrix, head after head, which is Megatron's own order.
"""

from toolkit.models.config_check import Settings
from toolkit.models.families.base import (
    HF_ACTIVATIONS,
    Family,
    MegatronModel,
    common_gpt,
    common_transformer,
    dropout,
    first_reason,
    rotary,
    unsupported_activation,
    unsupported_biases,
    unsupported_rope,
)
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.spec import ModelSpec

_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "gpt_neox.layers.{layer}"


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """GPT-NeoX as a megatron-core GPTModel, with a layer of ours for the parallel residual."""
    transformer = common_transformer(spec) | {
        "layernorm_epsilon": settings["layer_norm_eps"],
        "activation_func": HF_ACTIVATIONS[settings["hidden_act"]],
        "attention_dropout": dropout(settings, "attention_dropout"),
        "hidden_dropout": dropout(settings, "hidden_dropout"),
    }
    theta, share = settings["rotary_emb_base"], settings["rotary_pct"]
    return MegatronModel(
        transformer,
        common_gpt(spec) | rotary(settings, theta=theta, share=share),
        (*_outer_tensors(spec), *_layer_tensors(spec)),
        parallel_residual=settings["use_parallel_residual"],
    )


def _outer_tensors(spec: ModelSpec) -> list[TensorMap]:
    hidden, vocab = spec.hidden, spec.vocab
    final = "gpt_neox.final_layer_norm"
    tensors = [
        by_rows("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight", vocab, hidden,
                padded=True),
        whole("decoder.final_layernorm.weight", f"{final}.weight", hidden),
        whole("decoder.final_layernorm.bias", f"{final}.bias", hidden),
    ]  # fmt: skip
    if not spec.tied_embeddings:
        head = by_rows("output_layer.weight", "lm_head.weight", vocab, hidden, padded=True)
        tensors.append(head)
    return tensors


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
    return [
        *norms,
        by_rows(f"{attention}.linear_qkv.weight", f"{qkv}.weight", 3 * hidden, hidden),
        by_rows(f"{attention}.linear_qkv.bias", f"{qkv}.bias", 3 * hidden),
        by_columns(f"{attention}.linear_proj.weight", f"{hf_attention}.dense.weight", hidden,
                   hidden),
        whole(f"{attention}.linear_proj.bias", f"{hf_attention}.dense.bias", hidden),
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
    return first_reason(
        theta,
        unsupported_biases(spec),
        unsupported_rope(settings),
        unsupported_activation(settings["hidden_act"]),
    )


GPT_NEOX = Family("gpt_neox", model, unsupported, freezes_padding=False)
