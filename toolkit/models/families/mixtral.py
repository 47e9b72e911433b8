"""Mixtral: mistral in which every MLP is a set of experts chosen by a router."""

from collections.abc import Mapping

from toolkit.models.config_keys import FLAG, FLOAT, POSITIVE_FLOAT, SIZE, Key
from toolkit.models.families import common, llama, mistral
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.tensors import TensorMap, by_columns, gated, whole
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **mistral.KEYS,
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "sliding_window": Key(SIZE, nullable=True),
    "num_experts_per_tok": Key(SIZE, 2),
    "num_local_experts": Key(SIZE, 8),
    "output_router_logits": Key(FLAG, False),
    "router_aux_loss_coef": Key(FLOAT, 0.001),
    "router_jitter_noise": Key(FLOAT, 0.0),
}


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer that has them."""
    hidden, inner = spec.hidden, spec.expert_intermediate
    expert = f"{llama.HF_LAYER}.mlp.experts.{{expert}}"
    megatron = f"{llama.LAYER}.mlp.experts.local_experts.{{expert}}"
    gate, up, down = (f"{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
    router = f"{llama.HF_LAYER}.mlp.gate.weight"
    return [
        whole(f"{llama.LAYER}.mlp.router.weight", router, spec.experts, hidden),
        gated(f"{megatron}.linear_fc1.weight", gate, up, inner, hidden),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner),
    ]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Mixtral as a megatron-core GPTModel.

    transformers normalises the chosen experts' probabilities to a sum of 1, which is the
    softmax over the chosen experts' logits alone: Megatron's softmax after top-k.
    """
    router = {"moe_router_pre_softmax": False}
    return MegatronModel(
        llama.decoder_transformer(spec, settings) | router,
        common.gpt(spec) | common.rotary(settings, theta=1e6),
        (*llama.outer_tensors(spec), *llama.attention_tensors(spec), *expert_tensors(spec)),
        moe_layers=frozenset(range(spec.layers)),
    )


def unsupported_normalised_router(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot normalise over the chosen experts; None when it can."""
    if spec.experts_per_token > 1:
        return None
    return (
        "one expert per token with normalised probabilities gives the router no gradient; "
        "megatron-core refuses it"
    )


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this mixtral; None when it can."""
    jitter = None
    if settings["router_jitter_noise"]:
        jitter = "router_jitter_noise: megatron-core jitters the router's input alone, \
transformers the experts' as well"
    return common.first_reason(
        jitter, unsupported_normalised_router(spec), llama.unsupported(spec, settings)
    )


MIXTRAL = Family(
    "mixtral",
    KEYS,
    model,
    unsupported,
    aliases={"num_experts": "num_local_experts"},
    published_names=(
        (r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),
        (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
        (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
        (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
    ),
)
