"""Llama 4's text model: layers that turn interleaved pairs and see a chunk, and layers that do
neither; one expert per token, and a shared one, in layers between dense ones.

On turned layers, queries and keys are divided by their root mean square after the turn. On the
others, queries grow with the position (arXiv:2501.19399). The sigmoid of an expert's logit
multiplies what goes into the expert, not what comes out.
"""

from dataclasses import replace

from toolkit.models.families import llama
from toolkit.models.families.base import ChunkedLayers, MegatronModel
from toolkit.models.families.mixtures import mixture, refusing, shared_expert_tensors
from toolkit.models.families.tensors import TensorMap, by_columns, gated, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec


def _chunked_layers(config: Config) -> ChunkedLayers:
    """What the layers do with queries and keys."""
    numbered = [*enumerate(zip(config["layer_types"], config["no_rope_layers"], strict=True))]
    turned = frozenset(layer for layer, (_, turns) in numbered if turns)
    return ChunkedLayers(
        size=config["attention_chunk_size"],
        chunked=frozenset(i for i, (kind, _) in numbered if kind == "chunked_attention"),
        normed=turned if config["use_qk_norm"] else frozenset(),
        tempered=frozenset(range(len(numbered))) - turned
        if config["attn_temperature_tuning"]
        else frozenset(),
        floor=config["floor_scale"],
        growth=config["attn_scale"],
    )


FEED_FORWARD = f"{llama.HF_LAYER}.feed_forward"


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router, experts and shared expert of a layer."""
    hidden, inner = spec.hidden, spec.expert_intermediate
    expert = f"{FEED_FORWARD}.experts.{{expert}}"
    megatron = f"{llama.LAYER}.mlp.experts.local_experts.{{expert}}"
    gate_up, down = f"{expert}.gate_up_proj", f"{expert}.down_proj"
    fused = gated(f"{megatron}.linear_fc1.weight", gate_up, gate_up, inner, hidden)
    router = f"{FEED_FORWARD}.router.weight"
    return [
        whole(f"{llama.LAYER}.mlp.router.weight", router, spec.experts, hidden),
        replace(fused, transposed=True),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner, transposed=True),
        *shared_expert_tensors(hidden, inner, f"{FEED_FORWARD}.shared_expert"),
    ]


def llama4_text(config: Config, spec: ModelSpec) -> MegatronModel:
    """Llama 4's text model as a megatron-core GPTModel."""
    spec = replace(spec, query_key_norm=False)  # which have no weights, and come later
    layers = frozenset(config["moe_layers"])
    fields = {
        "moe_layer_freq": [int(layer in layers) for layer in range(spec.layers)],
        "moe_router_score_function": "sigmoid",
        # It chooses by score, transformers by logit: in 16 bits large scores are equal.
        "moe_router_dtype": "fp32",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": spec.shared_intermediate,
    }
    plain = mixture(config, spec, layers, expert_tensors(spec), fields, mlp=FEED_FORWARD)
    plain = replace(
        plain,
        transformer={**plain.transformer, "rotary_interleaved": True},
        chunked_layers=_chunked_layers(config),
    )
    reason = (
        f"num_experts_per_tok ({spec.experts_per_token}): megatron-core multiplies what goes "
        "into an expert by its score only with one expert per token, as published models do"
    )
    return refusing(plain, reason if spec.experts_per_token > 1 else None)
