"""Reads and counts a transformers model: config, shape, parameters, FLOPs, tensors.

Parameters are counted on the model without storage. FLOPs are those of the matrix products and
attention operators of two forward passes of different lengths: the part that grows with the
sequence length belongs to attention. The part of the model that a parameter belongs to is
derived from its module and name, so the sums are exact and their division into parts is
heuristic.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from inspect import getsource
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from toolkit.models.families import FAMILIES
from toolkit.models.families.base import Instance, MegatronModel
from toolkit.models.families.tensors import whole
from toolkit.models.huggingface import decoder_layers, meta_model
from toolkit.models.model import Attention, Config, Model, is_dropout
from toolkit.models.spec import ModelSpec, ParameterCounts, Scores
from toolkit.models.weights import checkpoint_names, weight_name

_SIZES: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate": (
        "intermediate_size_mlp",
        "intermediate_size",
        "ffn_dim",
        "decoder_ffn_dim",
        "n_inner",
        "d_ff",
    ),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
}
"""Names of a size in transformers' config classes, in order of preference."""
_LENGTHS = (64, 128)
"""Lengths of the two forward passes, in tokens."""
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|rwkv|conv")
_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\.experts?\b(?:\.(\d+)\.)?")
_QKV_BIAS = re.compile(r"\b(q_proj|qkv_proj|query_key_value|c_attn)\.bias$")
_OUTPUT_BIAS = re.compile(r"att\w*\.(o_proj|out_proj|dense|c_proj)\.bias$")
_SINKS = re.compile(r"\bsinks?\b")
_SHARED = re.compile(r"\.shared_(experts?|mlp)\..*weight$")
_UNBOUNDED = 2**31 - 1
"""Positions of a model whose config states no limit."""


def count(built: PretrainedConfig, stated: Mapping[str, Any], *, strict: bool) -> Model:
    """The model of transformers' config. Raises what transformers raises while it builds the
    model; if `strict`, while it runs, too."""
    config, names = _config(built, stated), dict(built.attribute_map)
    with no_init_weights():
        model = meta_model(built)
    model.tie_weights()
    spec = _spec(built, model, _parts(model), strict)
    return Model(config, names, spec, _attention(config, model))


def _config(built: PretrainedConfig, stated: Mapping[str, Any]) -> Config:
    values = {name: value for name, value in built.to_dict().items() if value is not None}
    values |= {name: values[own] for name, own in built.attribute_map.items() if own in values}
    own = {built.attribute_map.get(name, name) for name in stated}
    for name in values:
        if is_dropout(name) and built.attribute_map.get(name, name) not in own:
            values[name] = 0.0
    return Config({name: value for name, value in values.items() if name not in _UNREAD})


_UNREAD = ("id2label", "label2id", "transformers_version")


def _attention(config: Config, model: PreTrainedModel) -> Attention:
    """The fastest exact attention of transformers for it. Soft-capping is in `eager`."""
    capped = config["attn_logit_softcapping"] is not None
    return "sdpa" if model._supports_sdpa and not capped else "eager"


@lru_cache(maxsize=16)
def tensors(text: str) -> MegatronModel:
    """The checkpoint's tensors of a config, given as JSON."""
    model = meta_model(AutoConfig.for_model(**json.loads(text)))
    return _tensors(model, _parts(model))


def _size_of(stated: Mapping[str, Any], *names: str) -> int | None:
    """The first of these sizes that the config states and that is not 0. The largest, if it
    states one per layer."""
    for name in names:
        value = stated.get(name)
        if isinstance(value, list | tuple):
            value = max((one for one in value if isinstance(one, int)), default=None)
        if value and isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _windows(stated: Mapping[str, Any], layers: int) -> tuple[bool, int | None, int]:
    """Whether it is chunked instead of a sliding window, its size, and its layers: all, if the
    config does not list them."""
    kinds = list(stated.get("layer_types") or ["sliding_attention"] * layers)
    if "chunked_attention" in kinds:
        return True, _size_of(stated, "attention_chunk_size"), kinds.count("chunked_attention")
    window = _size_of(stated, "sliding_window")
    if stated.get("use_sliding_window") is False:
        window = None
    return False, window, min(kinds.count("sliding_attention"), layers) if window else 0


def _spec(
    config: PretrainedConfig, model: PreTrainedModel, parts: Mapping[str, str], strict: bool
) -> ModelSpec:
    vocab, hidden = _embedding(model).weight.shape
    stated = config.to_dict()
    stated |= {name: stated.get(own) for name, own in config.attribute_map.items()}
    heads = _size_of(stated, "num_attention_heads") or 1
    sizes = {ours: _size_of(stated, *names) for ours, names in _SIZES.items()}
    names = [*parts]
    moe_layers = {_LAYER.findall(name)[0] for name in names if _EXPERT.search(name)}
    layers = len(decoder_layers(model)) or _size_of(stated, "num_hidden_layers") or 1
    chunked, window, sliding = _windows(stated, layers)
    active = sizes["experts_per_token"] or 0
    counts = _parameters(model, parts, sizes["experts"] or 0, active)
    measured = _flops(model, counts, strict)
    # A model that reads values of its input cannot run without storage: then 2 FLOPs per
    # weight that a token uses, and attention in every layer, are assumed.
    flops, score_flops, every_expert = measured or (
        2.0 * _used(counts), 4.0 * layers * hidden, False
    )  # fmt: skip
    gated = any("gate" in name for name in names)
    return ModelSpec(
        family=config.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=_size_of(stated, "qk_head_dim", "head_dim") or max(1, hidden // heads),
        intermediate=sizes["intermediate"] or 4 * hidden,
        vocab=vocab,
        max_positions=sizes["max_positions"] or _UNBOUNDED,
        parameters=counts,
        flops=flops,
        score_flops=score_flops,
        assumed=measured is None,
        tied_embeddings=counts.lm_head == 0,
        sliding_window=window,
        sliding_layers=sliding,
        chunked=chunked,
        experts=(sizes["experts"] or 0) if moe_layers else 0,
        experts_per_token=active if moe_layers else 0,
        expert_intermediate=(sizes["expert_intermediate"] or 0) if moe_layers else 0,
        moe_layers=min(len(moe_layers), layers),
        shared_intermediate=_shared(model, hidden * len(moe_layers) * (3 if gated else 2)),
        every_expert=every_expert,
        latent=sum(_size_of(stated, name) or 0 for name in ("q_lora_rank", "kv_lora_rank")),
        gated_mlp=gated,
        learned_positions=counts.position_embedding > 0,
        norms_per_layer=round(sum(map(_is_layer_norm, names)) / layers),
        **_traits(model, parts),
        capped_logits=stated.get("final_logit_softcapping") is not None,
        scores=_scores(stated, names),
        generic=config.model_type not in FAMILIES,
    )


def _traits(model: PreTrainedModel, parts: Mapping[str, str]) -> dict[str, Any]:
    """The biases, norms and fused projections of the layers, by their fields of ModelSpec."""
    modules = {name: part for name, part in model.named_modules() if _LAYER.search(name)}
    biased = {part for name, part in parts.items() if name.endswith("bias")}
    fused, norms = r"\b(qkv_proj|query_key_value)\b", r"\b(q|k|qk|query|key)_(layer)?norm"
    return {
        "qkv_bias": any(map(_QKV_BIAS.search, parts)),
        "attention_output_bias": any(map(_OUTPUT_BIAS.search, parts)),
        "mlp_bias": not biased.isdisjoint(("mlp", "experts")),
        "query_key_norm": any(re.search(norms, name) for name in modules),
        "fused_qkv": any(re.search(fused, name) for name in modules),
        "layer_norm": any(isinstance(part, nn.LayerNorm) for part in modules.values()),
        "wide_norms": any(map(_is_wide, {type(part) for part in modules.values()})),
    }


def _scores(stated: Mapping[str, Any], names: Sequence[str]) -> Scores:
    if stated.get("attn_logit_softcapping"):
        return "capped"
    return "sinks" if any(_SINKS.search(name) for name in names) else "plain"


def _is_wide(kind: type) -> bool:
    """Is this the class of a norm that multiplies with 1 + weight in fp32? transformers writes
    all of them so, in Gemma's, Qwen3-Next's and others."""
    return "RMSNorm" in kind.__name__ and "(1.0 + self.weight.float())" in getsource(kind)


def _is_layer_norm(name: str) -> bool:
    """Whether this parameter is the weight of a norm of the residual stream in a layer. Norms
    inside attention are of heads or of latent vectors."""
    *above, norm, kind = name.split(".")
    inside = _LAYER.search(name) and not _ATTENTION.search(".".join(above))
    return bool(inside) and kind == "weight" and _part(f"{norm}.weight") == "norms"


def _shared(model: PreTrainedModel, rows: int) -> int:
    """Inner size of the experts of all tokens, whose matrices have `rows` of that size."""
    found = [p.numel() for name, p in model.named_parameters() if _SHARED.search(name)]
    return sum(found) // rows if rows else 0


def _embedding(model: PreTrainedModel) -> nn.Embedding:
    found = model.get_input_embeddings()
    if isinstance(found, nn.Embedding):
        return found
    return next(part for part in model.modules() if isinstance(part, nn.Embedding))


def _parameters(
    model: PreTrainedModel, parts: Mapping[str, str], experts: int, active: int
) -> ParameterCounts:
    """The model's parameters by part."""
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        found[parts[name]] += parameter.numel()
    idle = found["experts"] * (experts - active) // experts if experts else 0
    return ParameterCounts(**{part: found[part] for part in _KINDS}, inactive_experts=idle)


_KINDS: Mapping[str, str] = {
    "embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "attention": ".self_attention",
    "mlp": ".mlp",
    "router": ".router",
    "experts": ".mlp",
    "norms": "norm",
    "lm_head": "output_layer",
}
"""Parts of a model, fields of `ParameterCounts`, and their terms in megatron-core's names."""


def _parts(model: PreTrainedModel) -> dict[str, str]:
    """The part of the model that each of its parameters belongs to."""
    ends = {
        id(getattr(model.get_output_embeddings(), "weight", None)): "lm_head",
        id(_embedding(model).weight): "embedding",  # of a tied one, too
    }
    return {name: ends.get(id(p)) or _part(name) for name, p in model.named_parameters()}


def _part(name: str) -> str:
    """The part that follows from a parameter's name."""
    if re.search(r"\b(wpe|embed_positions|position_embeddings?)\b", name):
        return "position_embedding"
    if _EXPERT.search(name):
        return "experts"
    if re.search(r"(router|\bgate)\.(weight|bias)$", name):
        return "router"
    if "norm" in name or re.search(r"\bln_", name):
        return "norms"
    return "attention" if _ATTENTION.search(name) else "mlp"


def _used(parts: ParameterCounts) -> int:
    """Weights that a token is multiplied with."""
    lookup = parts.embedding if parts.lm_head else 0
    return parts.active - lookup - parts.position_embedding - parts.norms


def _flops(
    model: PreTrainedModel, parts: ParameterCounts, strict: bool
) -> tuple[float, float, bool] | None:
    """Forward FLOPs per token without attention's scores, and per query and key in all layers;
    and whether the model computes all experts on every token. Experts that are not chosen are
    not counted. None if the model cannot run without storage."""
    try:
        per_token = [_forward_flops(model, length) / length for length in _LENGTHS]
    except Exception as error:
        if strict and "meta" not in str(error):
            raise
        return None
    scores = (per_token[1] - per_token[0]) / (_LENGTHS[1] - _LENGTHS[0])
    flops = per_token[0] - scores * _LENGTHS[0]
    idle = 2.0 * parts.inactive_experts
    every_expert = idle > 0 and flops > 2.0 * _used(parts) + idle / 2
    return flops - idle * every_expert, scores, every_expert


def _forward_flops(model: PreTrainedModel, length: int) -> int:
    """FLOPs of one forward pass over one sequence, each query with each key. Of equal layers,
    the first runs: without values, their outputs are the same."""
    # With these three, no code reads values of the input.
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "batched_mm"
    for part in model.modules():
        if isinstance(kind := getattr(part, "rope_type", None), str | dict):  # by layer type
            plain: Any = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            part.rope_type = plain
    equal: dict[object, list[str]] = defaultdict(list)
    outputs: dict[object, Any] = {}
    for name, part in model.named_modules():
        if isinstance(part, GradientCheckpointingLayer):
            layer = _signature(part)
            equal[layer].append(name)
            part.forward = partial(_once, outputs, layer, partial(type(part).forward, part))
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    counts, whole_model = counter.get_flop_counts(), type(model).__name__
    return _flops_inside(counts, whole_model) + sum(
        (len(names) - 1) * _flops_inside(counts, f"{whole_model}.{names[0]}")
        for names in equal.values()
    )


def _signature(layer: nn.Module) -> object:
    """Everything that a layer's computation depends on, apart from its number."""
    settings = [
        (name, key, value)
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, int | float | str) and key != "layer_idx"
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    return type(layer), tuple(settings), tuple(shapes)


def _once(
    outputs: dict[object, Any],
    layer: object,
    forward: Callable[..., Any],
    *args: Any,
    **more: Any,
) -> object:
    """The output of the first of the layers that are equal to `layer`."""
    if layer not in outputs:
        outputs[layer] = forward(*args, **more)
    return outputs[layer]


def _flops_inside(counts: Mapping[str, Mapping[Any, int]], module: str) -> int:
    """FLOPs of a module, without those of rotary tables."""
    turned = (n for n in counts if n.startswith(f"{module}.") and n.endswith("rotary_emb"))
    own = counts.get(module, {})
    return sum(own.values()) - sum(sum(counts[name].values()) for name in turned)


class _Tensors(MegatronModel):
    """The tensors of a model that megatron-core does not know: each stands for itself."""

    def instances(self, *, buffers: bool = False) -> Any:
        """Every tensor, with the layer and the expert in its name. No buffers."""
        del buffers
        for tensor in self.tensors:
            name = tensor.stacks[0][0].tensor
            layer, expert = _LAYER.search(name), _EXPERT.search(name)
            numbers = [int(m[1]) if m and m[1] else None for m in (layer, expert)]
            yield Instance(tensor, *numbers)


def _tensors(model: PreTrainedModel, parts: Mapping[str, str]) -> MegatronModel:
    """The checkpoint's tensors under descriptive names, as in megatron-core."""
    linear = {  # without the head, which PEFT's `all-linear` leaves out as well
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not model.get_output_embeddings()
    }
    tensors = []
    for name, parameter in model.named_parameters():
        kind = _KINDS[parts[name]]
        shape = tuple(parameter.shape)
        for piece in checkpoint_names(weight_name(model, name, shape), shape):
            label = f"{kind}.linear_{piece.name}"
            if name not in linear:  # `linear_attn.conv1d` is no linear layer
                label = f"{kind}.{piece.name.replace('.linear_', '.')}"
            rows, *others = piece.shape or (1,)
            columns = prod(others) if others else None
            tensors.append(whole(label, piece.name, rows, columns))
    return _Tensors({"num_layers": 0}, {}, tuple(tensors))
