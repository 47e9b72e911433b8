"""What one rank of each pipeline stage holds, before ZeRO."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from toolkit.layout import Recompute, padded_vocab, stage_layers
from toolkit.models.spec import FrozenParameters, ModelSpec


class StageShare(NamedTuple):
    """Layers and parameters of one rank of a pipeline stage."""

    stage: int
    """Pipeline rank, from 0."""
    layers: int
    dense: float
    """Parameters without those of the experts and the vocabulary."""
    experts: float
    vocabulary: float
    """Parameters of the embedding and the output head."""
    output: float
    """Parameters of the output head, also if tied to the embedding."""
    frozen: "StageShare | None" = None
    """The frozen part of these. None: everything trains."""

    @property
    def trained(self) -> "StageShare":
        """This share, with the parameters that train only."""
        rest = self.frozen
        if rest is None:
            return self
        return StageShare(
            self.stage,
            self.layers,
            dense=max(0.0, self.dense - rest.dense),
            experts=max(0.0, self.experts - rest.experts),
            vocabulary=max(0.0, self.vocabulary - rest.vocabulary),
            output=max(0.0, self.output - rest.output),
        )

    @property
    def parameters(self) -> float:
        """All parameters of the rank."""
        return self.dense + self.experts + self.vocabulary


@lru_cache(maxsize=4096)
def layers_of_stages(
    layers: int, pp: int, vpp: int, stages: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Layers on each pipeline rank, all its chunks together."""
    chunks = stage_layers(layers, pp, vpp, stages)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


@lru_cache(maxsize=4096)
def recomputed_of_stages(
    recompute: Recompute,
    layers: int,
    pp: int,
    vpp: int,
    stages: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Layers on each pipeline rank that recompute covers: so many of each chunk, or all."""
    if isinstance(recompute, str):
        return layers_of_stages(layers, pp, vpp, stages)
    chunks = [min(recompute, size) for size in stage_layers(layers, pp, vpp, stages)]
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def stage_share(
    spec: ModelSpec,
    tp: int,
    ep: int,
    pp: int,
    vpp: int,
    stage: int,
    stages: tuple[int, ...] = (),
) -> StageShare:
    """The share of one rank of pipeline rank `stage`.

    Norms, routers and learned positions are replicated on every tensor-parallel rank. An expert
    is whole on its rank with expert parallel, otherwise split like a dense MLP. `stages`: as of
    `stage_layers`.
    """
    parts = spec.parameters
    layers = layers_of_stages(spec.layers, pp, vpp, stages)[stage]
    split = (parts.attention + parts.mlp) / tp + parts.norms + parts.router
    experts = parts.experts / (ep if ep > 1 else tp)
    matrix = _vocabulary(spec, tp)
    output = 0.0
    if stage == pp - 1:
        output = matrix
    vocabulary = 0.0 if spec.tied_embeddings and pp == 1 else output
    if stage == 0:
        vocabulary += matrix + parts.position_embedding
    part = layers / spec.layers
    share = StageShare(stage, layers, part * split, part * experts, vocabulary, output)
    if spec.adapters is not None:
        own = spec.adapters
        dense = layers * (own.split / tp + own.whole) / spec.layers
        experts = own.experts / ep if ep > 1 else own.experts_split / tp + own.experts_whole
        return share._replace(
            dense=share.dense + dense, experts=share.experts + part * experts, frozen=share
        )
    if spec.frozen is None:
        return share
    bounds = list(accumulate(stage_layers(spec.layers, pp, vpp, stages), initial=0))
    held = [i for chunk in range(stage, pp * vpp, pp) for i in range(*bounds[chunk:][:2])]
    return share._replace(frozen=_frozen(spec, spec.frozen, share, held, tp, ep))


def _vocabulary(spec: ModelSpec, tp: int) -> float:
    """Parameters of a matrix with a row per token, on one of `tp` ranks."""
    return padded_vocab(spec.vocab, tp) * spec.hidden / tp


def _frozen(
    spec: ModelSpec,
    frozen: FrozenParameters,
    share: StageShare,
    held: Sequence[int],
    tp: int,
    ep: int,
) -> StageShare:
    """The frozen part of a stage that holds the layers `held`, split like its share."""
    split, whole, experts = (
        sum(counts[layer] for layer in held)
        for counts in (frozen.layers, frozen.whole, frozen.experts)
    )
    head = frozen.embedding if spec.tied_embeddings else frozen.lm_head
    output = share.output if head else 0.0
    vocabulary = 0.0
    if share.stage == 0:
        embedding = _vocabulary(spec, tp) if frozen.embedding else 0.0
        vocabulary = embedding + frozen.position_embedding
    if share.stage > 0 or not spec.tied_embeddings:
        vocabulary += output
    final_norm = frozen.final_norm * share.layers / spec.layers  # in every layer, as there
    dense = split / tp + whole + final_norm
    split_experts = experts / (ep if ep > 1 else tp)
    return StageShare(share.stage, share.layers, dense, split_experts, vocabulary, output)
