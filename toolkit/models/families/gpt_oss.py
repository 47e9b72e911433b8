"""gpt-oss: mixture of experts with biases everywhere, attention sinks and alternating windows.

A sink is a logit per head that takes part in the softmax over the scores and has no value. The
experts compute (up + 1) · gate · sigmoid(1.702 · gate), gate and up clamped. Checkpoints keep
the experts of a layer in one tensor, [in, out], gate and up projection in alternating columns.
"""

from toolkit.models.families import llama
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.mixtures import mixture, refusing, router_reason
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    by_rows,
    gated_alternating,
    whole,
)
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer, with their biases."""
    hidden, inner = spec.hidden, spec.expert_intermediate
    router, ours = f"{llama.HF_LAYER}.mlp.router", f"{llama.LAYER}.mlp.router"
    expert = f"{llama.HF_LAYER}.mlp.experts.{{expert}}"
    megatron = f"{llama.LAYER}.mlp.experts.local_experts.{{expert}}"
    gate_up, down = f"{expert}.gate_up_proj", f"{expert}.down_proj"
    return [
        whole(f"{ours}.weight", f"{router}.weight", spec.experts, hidden),
        whole(f"{ours}.bias", f"{router}.bias", spec.experts),
        gated_alternating(f"{megatron}.linear_fc1.weight", gate_up, inner, hidden),
        gated_alternating(f"{megatron}.linear_fc1.bias", f"{gate_up}_bias", inner, None),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner, transposed=True),
        whole(f"{megatron}.linear_fc2.bias", f"{down}_bias", hidden),
    ]


def gpt_oss(config: Config, spec: ModelSpec) -> MegatronModel:
    """gpt-oss as a megatron-core GPTModel."""
    sinks = by_rows(
        f"{llama.LAYER}.self_attention.core_attention.softmax_offset",
        f"{llama.HF_LAYER}.self_attn.sinks",
        spec.heads,
    )
    fields = {
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": config["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "moe_router_pre_softmax": False,
    }
    layers, attention = frozenset(range(spec.layers)), [*llama.attention_tensors(spec), sinks]
    alpha = "swiglu_alpha: that of the Megatron model's experts is 1.702"
    return refusing(
        mixture(config, spec, layers, expert_tensors(spec), fields, attention),
        alpha if config["swiglu_alpha"] != 1.702 else None,
        router_reason(spec),
    )
