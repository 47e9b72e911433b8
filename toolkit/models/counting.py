"""Counts a transformers model without a family file: shape, parameters, FLOPs, tensors.

Parameters are counted on the model without storage; FLOPs are those of the matrix products and
attention operators of two forward passes of different lengths: the part that grows with the
sequence length belongs to attention. The part of the model that a parameter belongs to is
derived from its module and name, so the sums are exact and their division into parts is
heuristic.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import getsource
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.models.families.base import Instance, MegatronModel
from toolkit.models.families.generic import SIZES, build_config, size_of, windows
from toolkit.models.families.tensors import whole
from toolkit.models.huggingface import decoder_layers, meta_model
from toolkit.models.spec import Counted, ModelSpec, ParameterCounts, Scores
from toolkit.models.weights import checkpoint_names, weight_name

_LENGTHS = (64, 128)
"""Of the two forward passes, in tokens."""
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|rwkv|conv")
_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\.experts?\b(?:\.(\d+)\.)?")
_SINKS = re.compile(r"\bsinks?\b")
_SHARED = re.compile(r"\.shared_(experts?|mlp)\..*weight$")
_UNBOUNDED = 2**31 - 1
"""Positions of a model whose config states no limit."""


@dataclass(frozen=True)
class Count:
    """The result for one config."""

    spec: ModelSpec
    tensors: MegatronModel
    supports_sdpa: bool


@lru_cache(maxsize=16)
def count(config: str) -> Count:
    """Count the model of a config, given as JSON for which `check_config` found no problem."""
    built = build_config(json.loads(config))
    model = meta_model(built)
    parts = _parts(model)
    return Count(_spec(built, model, parts), _tensors(model, parts), bool(model._supports_sdpa))


def _spec(
    config: PretrainedConfig, model: PreTrainedModel, parts: Mapping[str, str]
) -> ModelSpec:
    vocab, hidden = _embedding(model).weight.shape
    stated = config.to_dict()
    stated |= {name: stated.get(own) for name, own in config.attribute_map.items()}
    heads = size_of(stated, "num_attention_heads") or 1
    sizes = {ours: size_of(stated, *names) for ours, names in SIZES.items()}
    names = [*parts]
    moe_layers = {_LAYER.findall(name)[0] for name in names if _EXPERT.search(name)}
    layers = len(decoder_layers(model)) or size_of(stated, "num_hidden_layers") or 1
    chunked, window, sliding = windows(stated, layers)
    active = sizes["experts_per_token"] or 0
    counts = _parameters(model, parts, sizes["experts"] or 0, active)
    counted, every_expert = _flops(model, counts, layers)
    gated = any("gate" in name for name in names)
    modules = {name: part for name, part in model.named_modules() if _LAYER.search(name)}
    return ModelSpec(
        family=config.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=size_of(stated, "qk_head_dim", "head_dim") or max(1, hidden // heads),
        intermediate=sizes["intermediate"] or 4 * hidden,
        vocab=vocab,
        max_positions=sizes["max_positions"] or _UNBOUNDED,
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
        latent=sum(size_of(stated, name) or 0 for name in ("q_lora_rank", "kv_lora_rank")),
        gated_mlp=gated,
        learned_positions=counts.position_embedding > 0,
        query_key_norm=any(
            re.search(r"\b(q|k|qk|query|key)_(layer)?norm", name) for name in modules
        ),
        fused_qkv=any(re.search(r"\b(qkv_proj|query_key_value)\b", name) for name in modules),
        layer_norm=any(isinstance(part, nn.LayerNorm) for part in modules.values()),
        norms_per_layer=round(sum(map(_is_layer_norm, names)) / layers),
        wide_norms=any(map(_is_wide, {type(part) for part in modules.values()})),
        capped_logits=stated.get("final_logit_softcapping") is not None,
        scores=_scores(stated, names),
        counted=counted,
        generic=True,
    )


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


def _flops(model: PreTrainedModel, parts: ParameterCounts, layers: int) -> tuple[Counted, bool]:
    """Forward FLOPs per token without attention's scores, and per query and key in all layers;
    and whether the model computes all experts on every token. Experts that are not chosen are
    not counted.

    A model that reads values of its input cannot run without storage: then 2 FLOPs per weight
    that a token uses, and attention in every layer, are assumed.
    """
    lookup = parts.embedding if parts.lm_head else 0
    used = parts.active - lookup - parts.position_embedding - parts.norms
    try:
        per_token = [_forward_flops(model, length) / length for length in _LENGTHS]
    except Exception:  # noqa: BLE001 - a model's own code raises what it likes
        hidden = _embedding(model).weight.shape[1]
        return Counted(parts, 2.0 * used, 4.0 * layers * hidden, assumed=True), False
    scores = (per_token[1] - per_token[0]) / (_LENGTHS[1] - _LENGTHS[0])
    flops = per_token[0] - scores * _LENGTHS[0]
    idle = 2.0 * parts.inactive_experts
    every_expert = idle > 0 and flops > 2.0 * used + idle / 2
    return Counted(parts, flops - idle * every_expert, scores), every_expert


def _forward_flops(model: PreTrainedModel, length: int) -> int:
    """FLOPs of one forward pass over one sequence, each query with each key."""
    # With these two, no code reads values of the input.
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "batched_mm"
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return counter.get_total_flops()


class _Tensors(MegatronModel):
    """The tensors of a model that megatron-core does not know: each stands for itself."""

    def instances(self, *, buffers: bool = False) -> Any:
        """Every tensor, with the layer and the expert in its name; no buffers."""
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
            label = f"{kind}.linear_{piece.name}" if name in linear else f"{kind}.{piece.name}"
            rows, *others = piece.shape or (1,)
            columns = prod(others) if others else None
            tensors.append(whole(label, piece.name, rows, columns))
    return _Tensors({"num_layers": 0}, {}, tuple(tensors))
