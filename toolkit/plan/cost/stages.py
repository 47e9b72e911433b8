"""What one rank of each pipeline stage holds, before ZeRO."""

from functools import lru_cache
from typing import NamedTuple

from toolkit.layout import padded_vocab, stage_layers
from toolkit.models.spec import ModelSpec


class StageShare(NamedTuple):
    """Layers and parameters of one rank of a pipeline stage."""

    stage: int
    """Pipeline rank, from 0."""
    layers: int
    dense: float
    """Parameters but for the experts' and the vocabulary's."""
    experts: float
    vocabulary: float
    """Parameters that embed tokens or make logits."""
    output: float
    """Those that make logits, also where they are the embedding's."""

    @property
    def parameters(self) -> float:
        """All parameters of the rank."""
        return self.dense + self.experts + self.vocabulary


@lru_cache(maxsize=4096)
def layers_of_stages(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers on each pipeline rank, all its chunks together."""
    chunks = stage_layers(layers, pp, vpp)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


@lru_cache(maxsize=16384)
def stage_share(spec: ModelSpec, tp: int, ep: int, pp: int, vpp: int, stage: int) -> StageShare:
    """The share of one rank of pipeline rank `stage`.

    Norms, routers and learned positions are whole on every tensor-parallel rank; one expert
    is whole on its rank with expert parallel, else split like a dense MLP.
    """
    parts = spec.parameters
    layers = layers_of_stages(spec.layers, pp, vpp)[stage]
    split = (parts.attention + parts.mlp) / tp + parts.norms + parts.router
    experts = parts.experts / (ep if ep > 1 else tp)
    matrix = padded_vocab(spec.vocab, tp) * spec.hidden / tp
    output = matrix if stage == pp - 1 else 0.0
    vocabulary = 0.0 if spec.tied_embeddings and pp == 1 else output
    if stage == 0:
        vocabulary += matrix + parts.position_embedding
    part = layers / spec.layers
    return StageShare(stage, layers, part * split, part * experts, vocabulary, output)
