"""Observes the choices of megatron-core's routers."""

from collections.abc import Callable, Sequence
from functools import partial

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from toolkit.models.families import MegatronModel
from toolkit.models.routers import Observer, Routing


def watch(
    chunks: Sequence[nn.Module], model: MegatronModel, observer: Observer
) -> dict[int, nn.Module]:
    """Call `observer` with the routing of this rank's chunks for batches whose padding is given
    (`GPTChunk.forward`). Return the routers by layer.

    With sequence parallel this rank holds a part of the tokens of each row.
    """
    layers, found = sorted(model.moe_layers), {}
    for chunk in chunks:
        for router in (part for part in chunk.modules() if isinstance(part, TopKRouter)):
            layer = layers.index(router.layer_number - 1)
            router.routing = partial(_routing, router.routing, partial(observer, layer))
            found[layer] = router
    return found


def _routing(
    routing: Callable[[Tensor], tuple[Tensor, Tensor]],
    observer: Callable[[Routing], Tensor],
    logits: Tensor,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Replaces `TopKRouter.routing`: logits [tokens, rows, experts] → weights and choice, both
    [tokens · rows, experts].

    megatron-core passes the mask [tokens, rows], also to recomputed layers.
    """
    weights, chosen = routing(logits)
    if padding_mask is None:
        return weights, chosen
    if logits.requires_grad:  # megatron-core supports gradients in this memory order only
        logits.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    by_row = chosen.view(logits.shape).transpose(0, 1)
    seen = Routing(logits.transpose(0, 1), by_row, weights, ~padding_mask.T)
    return observer(seen), chosen
