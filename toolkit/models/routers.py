"""The routers of mixture-of-experts layers: their scores, and observing their choices.

A router computes a logit per token and expert, scores the logits, and chooses the k experts of
the largest scores. The observed data, a `Routing`, is the same for transformers' models and for
megatron-core's (`megatron/routers.py`). Where it is observed differs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from toolkit.errors import Problem
from toolkit.models.families import model_spec
from toolkit.models.types import BIASED, SCORES
from toolkit.recipe.schema import BalanceSection

if TYPE_CHECKING:
    from torch import Tensor, nn


def balance_problems(
    balance: BalanceSection | None, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Why the experts of the model of this `config` cannot be balanced as asked."""
    if balance is None:
        return
    model_type = config["model_type"]
    if not model_spec(config).moe_layers:
        found, allowed = (
            f"settings for {model_type}, which has no experts",
            "null without experts",
        )
        yield Problem("model.balance", found, allowed, "remove model.balance")
    elif model_type not in SCORES:
        found = f"settings for {model_type}, whose routers DMT does not know"
        allowed = f"null, or one of the model types {', '.join(sorted(SCORES))}"
        yield Problem("model.balance", found, allowed, "remove model.balance")
    elif balance.kind == "bias" and model_type not in BIASED:
        yield Problem(
            "model.balance.kind",
            f"bias for {model_type}: transformers' {model_type} has no such bias, so the "
            "exported model would choose other experts",
            f"sequence_loss, or one of the model types {', '.join(sorted(BIASED))}",
            "set model.balance to {kind: sequence_loss, coefficient: 0.001}",
        )


@dataclass(frozen=True)
class Routing:
    """The routing of this rank's tokens of a micro batch in one layer."""

    logits: "Tensor"
    """[rows, tokens, experts]."""
    chosen: "Tensor"
    """bool [rows, tokens, experts]: whether the expert is among the token's k."""
    weights: "Tensor"
    """Weights of the experts' outputs, in the shape that the model uses."""
    real: "Tensor"
    """bool [rows, tokens]: whether the token is not padding."""


Observer: TypeAlias = "Callable[[int, Routing], Tensor]"
"""Called with the index of a layer among those with experts, and its routing. Called again if a
layer is recomputed. Returns the weights that the model then uses."""


def is_router(part: "nn.Module") -> bool:
    """Whether this module of a transformers model is a router."""
    return re.search("(Top[kK]|Llama4)Router$", type(part).__name__) is not None


def outcome(router: "nn.Module", output: "tuple[Tensor, ...]") -> "tuple[Tensor, ...]":
    """What a router returned, as logits [tokens, experts], weights, and indices [tokens, k]."""
    if len(output) == 3:
        return output
    weights, logits = output  # llama4's: its weights are those of all experts
    return logits, weights, logits.topk(router.top_k).indices  # type: ignore[arg-type]


def watch(
    model: "nn.Module", real: "Callable[[], Tensor | None]", observer: Observer
) -> "dict[int, nn.Module]":
    """Call `observer` with the routing of a transformers model. Return the routers by layer.

    `real` returns `Routing.real` of the current batch. None: do not observe. Called before an
    engine adds its own hooks.
    """
    parts = dict(enumerate(part for part in model.modules() if is_router(part)))
    for layer, router in parts.items():
        router.register_forward_hook(partial(_after_router, real, partial(observer, layer)))
    return parts


def _after_router(
    real: "Callable[[], Tensor | None]",
    observer: "Callable[[Routing], Tensor]",
    router: "nn.Module",
    _inputs: "tuple[Tensor, ...]",
    output: "tuple[Tensor, ...]",
) -> "tuple[Tensor, ...] | None":
    """The router's output with the observer's weights."""
    mask = real()
    if mask is None:
        return None
    logits, weights, indices = outcome(router, output)
    chosen = logits.new_zeros(logits.shape).scatter(-1, indices, 1.0).bool()
    shape = (*mask.shape, -1)
    routing = Routing(logits.view(shape), chosen.view(shape), weights, mask)
    joined = observer(routing)
    return tuple(joined if one is weights else one for one in output)
