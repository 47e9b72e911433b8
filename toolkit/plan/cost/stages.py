"""What one rank of each pipeline stage holds, before ZeRO."""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from toolkit.layout import padded_vocab, stage_layers
from toolkit.models.spec import ModelSpec


class _Frozen(NamedTuple):
    """Parameters of a share that do not train, by the fields of `StageShare`."""

    dense: float
    experts: float
    vocabulary: float
    output: float


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
    frozen: _Frozen | None = None
    """What of these does not train; None: everything trains."""

    @property
    def trained(self) -> "StageShare":
        """The same with the parameters that train."""
        if self.frozen is None:
            return self
        rest = {key: getattr(self, key) - value for key, value in self.frozen._asdict().items()}
        return self._replace(frozen=None, **{key: max(0.0, x) for key, x in rest.items()})

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
    share = StageShare(stage, layers, part * split, part * experts, vocabulary, output)
    return (
        share._replace(frozen=_frozen(spec, tp, ep, pp, vpp, share)) if spec.frozen else share
    )


def _frozen(spec: ModelSpec, tp: int, ep: int, pp: int, vpp: int, share: StageShare) -> _Frozen:
    """What of a stage's share does not train; the final norm counts in every layer, as there."""
    frozen = spec.frozen
    assert frozen is not None
    bounds = list(accumulate(stage_layers(spec.layers, pp, vpp), initial=0))
    held = [i for chunk in range(share.stage, pp * vpp, pp) for i in range(*bounds[chunk:][:2])]
    split, whole, experts = (
        sum(counts[layer] for layer in held)
        for counts in (frozen.layers, frozen.whole, frozen.experts)
    )
    matrix = padded_vocab(spec.vocab, tp) * spec.hidden / tp
    head = frozen.embedding if spec.tied_embeddings else frozen.lm_head
    output = matrix if head and share.stage == pp - 1 else 0.0
    vocabulary = 0.0 if spec.tied_embeddings and pp == 1 else output
    if share.stage == 0:
        vocabulary += (matrix if frozen.embedding else 0.0) + frozen.position_embedding
    dense = split / tp + whole + frozen.final_norm * share.layers / spec.layers
    return _Frozen(dense, experts / (ep if ep > 1 else tp), vocabulary, output)
