"""Llama 4's text model: layers that turn interleaved pairs and see a chunk, and layers that do
neither; one expert per token, and a shared one, in layers between dense ones.

On turned layers, queries and keys are divided by their root mean square after the turn. On the
others, queries grow with the position (arXiv:2501.19399). The sigmoid of an expert's logit
multiplies what goes into the expert, not what comes out.
"""

from dataclasses import replace

from toolkit.models.config_keys import CHUNKED_TYPES, FLAG, SWITCHES, Key, keys_of
from toolkit.models.families import common, llama
from toolkit.models.families.base import (
    ChunkedLayers,
    Family,
    MegatronModel,
    Settings,
)
from toolkit.models.families.mixtures import mixture, shared_expert_tensors
from toolkit.models.families.shape import counted, sizes
from toolkit.models.families.tensors import TensorMap, by_columns, gated, whole
from toolkit.models.spec import ModelSpec


def layers_with_experts(settings: Settings) -> frozenset[int]:
    """The listed ones; without a list, the last of every `interleave_moe_layer_step`."""
    stated, step = settings["moe_layers"], settings["interleave_moe_layer_step"]
    last = range(step - 1, settings["num_hidden_layers"], step)
    return frozenset(last if stated is None else stated)


def chunked_layers(settings: Settings) -> ChunkedLayers:
    """What the layers do with queries and keys."""
    layers = frozenset(range(settings["num_hidden_layers"]))
    unturned = frozenset(common.layers_without_rotary(settings))
    types = settings["layer_types"]
    chunked = layers - unturned
    if types is not None:
        chunked = frozenset(i for i in layers if types[i] == "chunked_attention")
    return ChunkedLayers(
        size=settings["attention_chunk_size"],
        chunked=chunked,
        normed=layers - unturned if settings["use_qk_norm"] else frozenset(),
        tempered=unturned if settings["attn_temperature_tuning"] else frozenset(),
        floor=settings["floor_scale"],
        growth=settings["attn_scale"],
    )


def shape(settings: Settings) -> ModelSpec:
    """The shape: experts and the shared one have another size than dense layers' MLPs."""
    experts, chunks = layers_with_experts(settings), chunked_layers(settings)
    inner = settings["intermediate_size"] if experts else 0
    spec = replace(
        sizes(settings),
        intermediate=settings["intermediate_size_mlp"],
        moe_layers=len(experts),
        expert_intermediate=inner,
        shared_intermediate=inner,
        sliding_window=chunks.size if chunks.chunked else None,
        sliding_layers=len(chunks.chunked),
        chunked=True,
        every_expert=True,
        query_key_norm=settings["use_qk_norm"],
    )
    return counted(settings, spec)


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


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Llama 4's text model as a megatron-core GPTModel."""
    spec = replace(spec, query_key_norm=False)  # which have no weights, and come later
    layers = layers_with_experts(settings)
    fields = {
        "moe_layer_freq": [int(layer in layers) for layer in range(spec.layers)],
        "moe_router_score_function": "sigmoid",
        # It chooses by score, transformers by logit: in 16 bits large scores are equal.
        "moe_router_dtype": "fp32",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": spec.shared_intermediate,
    }
    experts = expert_tensors(spec)
    plain = mixture(spec, settings, layers, experts, fields, mlp=FEED_FORWARD)
    return replace(plain, chunked_layers=chunked_layers(settings))


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this llama4_text; None when it can."""
    router = None
    if spec.moe_layers and spec.experts_per_token > 1:
        router = (
            f"num_experts_per_tok ({spec.experts_per_token}): megatron-core multiplies what "
            "goes into an expert by its score only with one expert per token, which published "
            "models have"
        )
    return common.first_reason(router, llama.unsupported(spec, settings))


LLAMA4_TEXT = Family(
    "llama4_text",
    keys_of(
        "llama4_text",
        no_rope_layers=Key(SWITCHES, nullable=True, empty_is_default=True),
        layer_types=Key(CHUNKED_TYPES, nullable=True),
        for_llm_compressor=Key(FLAG),  # in published configs; transformers reads it nowhere
    ),
    model,
    unsupported,
    aliases={"num_experts": "num_local_experts"},
    theta=500_000.0,
    interleaved=True,
    shape=shape,
    stacked_experts=True,
)
