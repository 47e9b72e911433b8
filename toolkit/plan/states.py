"""Memory of model states: weights, gradients and optimizer states on the fullest device."""

from dataclasses import dataclass

from toolkit.models.spec import ModelSpec
from toolkit.plan.layout import Layout, padded_vocab, stage_layers
from toolkit.plan.legality import Pair

GIB = 2**30


@dataclass(frozen=True)
class ModelStates:
    """What AdamW training keeps of a model, spread by a layout."""

    spec: ModelSpec
    precision: str
    pair: Pair

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight as the model computes with it."""
        return 4.0 if self.precision == "fp32" else 2.0

    def gib(self, layout: Layout) -> float:
        """GiB of weights, gradients and optimizer states on the fullest device.

        What is offloaded counts as away, although parts of it pass through the device.
        """
        # The optimizer states of an expert are spread over the ranks that hold this expert.
        expert_ranks = layout.dp * layout.tp // layout.ep if layout.ep > 1 else layout.dp
        return (
            max(
                dense * self._bytes(layout, layout.dp)
                + experts * self._bytes(layout, expert_ranks)
                for dense, experts in self._parameters(layout)
            )
            / GIB
        )

    def peak_gib(self, layout: Layout) -> float:
        """The most that model states ever take: in training, or while the model is built."""
        return max(self.gib(layout), self.building_gib(layout))

    def building_gib(self, layout: Layout) -> float:
        """GiB of weights on the fullest device while the model is built.

        megatron-core builds all that a tensor-parallel rank computes with; only then does
        DeepSpeed shard or offload it. transformers' models are sharded while they are built.
        """
        if self.pair != Pair("deepspeed", "megatron"):
            return 0.0
        parameters = max(dense + experts for dense, experts in self._parameters(layout))
        return parameters * self.weight_bytes / GIB

    def _bytes(self, layout: Layout, copies: int) -> float:
        """Bytes that a rank keeps per parameter that it holds, one of `copies` ranks.

        Sources: ZeRO, arXiv:1910.02054, figure 1: 2 for the weight, 2 for the gradient, 12
        for the optimizer (fp32 weight and two moments). In fp32 the weight needs no second
        copy: 4, 4, 8. megatron-core sums gradients in fp32 (its guide to the distributed
        optimizer: 18 bytes, 6 + 12/d sharded).
        """
        weight, gradient, optimizer = self.weight_bytes, 2.0, 12.0
        if self.pair.engine == "megatron":
            gradient = 4.0
        if self.precision == "fp32":
            gradient, optimizer = 4.0, 8.0
        if layout.zero_stage >= 1:
            optimizer /= copies
        if layout.zero_stage >= 2:
            gradient /= copies
        if layout.zero_stage >= 3:
            weight /= copies
        if layout.offload_optimizer != "none":
            optimizer = 0.0
        if layout.offload_parameters != "none":
            weight = 0.0
        return weight + gradient + optimizer

    def _parameters(self, layout: Layout) -> list[tuple[float, float]]:
        """Parameters on a rank of each pipeline stage before ZeRO: all but experts, experts.

        Norms, routers and learned positions are whole on every tensor-parallel rank; one
        expert is whole on its rank with expert parallel, else split like a dense MLP.
        """
        parts, spec = self.spec.parameters, self.spec
        chunks = stage_layers(spec.layers, layout.pp, layout.vpp)
        split = (parts.attention + parts.mlp) / layout.tp + parts.norms + parts.router
        experts = parts.experts / (layout.ep if layout.ep > 1 else layout.tp)
        vocabulary = padded_vocab(spec.vocab, layout.tp) * spec.hidden / layout.tp
        stages = []
        for stage in range(layout.pp):
            share = sum(chunks[stage :: layout.pp]) / spec.layers
            dense = share * split
            if stage == 0:
                dense += vocabulary + parts.position_embedding
            if stage == layout.pp - 1 and not (spec.tied_embeddings and layout.pp == 1):
                dense += vocabulary
            stages.append((dense, share * experts))
        return stages
