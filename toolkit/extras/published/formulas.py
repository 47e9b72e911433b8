"""Model states from parameter counts alone, as published formulas define them.

For models known only by their number of parameters, and to compare with the tools that print
these figures. The needs of this toolkit's runs are in `toolkit.plan.cost.memory`.
"""

from dataclasses import dataclass

ZERO_WEIGHT, ZERO_GRADIENT, ZERO_OPTIMIZER = 2.0, 2.0, 12.0
"""Bytes per parameter in 16 bits with AdamW (ZeRO, arXiv:1910.02054, section 3.1: K = 12)."""
HOST_BUFFER_FACTOR = 1.5
"""DeepSpeed's estimator adds half to what the host needs (`additional_buffer_factor`)."""


@dataclass(frozen=True)
class StateCounts:
    """Bytes of model states of one rank, and what its node's host memory holds."""

    parameters: float
    gradients: float
    optimizer: float
    host_per_node: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer


def zero_paper(parameters: float, stage: int, ranks: int) -> StateCounts:
    """ZeRO's figure 1: stage 1 spreads the optimizer, 2 gradients too, 3 weights too."""

    def spread(bytes_each: float, from_stage: int) -> float:
        return parameters * bytes_each / (ranks if stage >= from_stage else 1)

    return StateCounts(
        spread(ZERO_WEIGHT, 3), spread(ZERO_GRADIENT, 2), spread(ZERO_OPTIMIZER, 1)
    )


@dataclass(frozen=True)
class EstimatorQuery:
    """The inputs of DeepSpeed's memory estimators (memory.rst in its documentation)."""

    parameters: float
    largest_layer: float
    """Parameters of the largest layer, which ZeRO-3 gathers."""
    stage: int
    nodes: int
    gpus_per_node: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    zero_init: bool = True
    """The model is created in pieces under ZeRO-3, never whole on a host."""


def deepspeed_estimator(query: EstimatorQuery) -> StateCounts:
    """`estimate_zero2_model_states_mem_needs` and its ZeRO-3 counterpart.

    Their conventions: ZeRO-2 counts 2 bytes of weight, 2 of gradient and 16 spread over the
    ranks; ZeRO-3 spreads 18 (2 weight, 4 fp32 gradient, 12 optimizer) and gathers weights
    and gradients of the largest layer; host memory has a buffer of one half.
    """
    return _estimator_zero3(query) if query.stage == 3 else _estimator_zero2(query)


def _estimator_zero2(query: EstimatorQuery) -> StateCounts:
    count, per_node = query.parameters, query.gpus_per_node
    ranks = query.nodes * per_node
    if query.offload_optimizer:
        host = count * max(4 * ranks, 16) * HOST_BUFFER_FACTOR
        return StateCounts(2 * count, 0.0, 0.0, host)
    host = count * 4 * per_node * HOST_BUFFER_FACTOR
    return StateCounts(2 * count, 2 * count + 4 * count / ranks, 12 * count / ranks, host)


def _estimator_zero3(query: EstimatorQuery) -> StateCounts:
    count, per_node = query.parameters, query.gpus_per_node
    ranks = query.nodes * per_node
    gathered = 4 * query.largest_layer
    whole_model = 4 * per_node * count  # every process builds it in fp32
    if not query.offload_optimizer:
        host = 4 * per_node * query.largest_layer if query.zero_init else whole_model
        shard = StateCounts(2 * count / ranks, 4 * count / ranks, 12 * count / ranks)
    else:
        away = (18 if query.offload_parameters else 16) * count / query.nodes
        host = away if query.zero_init else max(whole_model, away)
        shard = StateCounts(0.0 if query.offload_parameters else 2 * count / ranks, 0.0, 0.0)
    return StateCounts(
        shard.parameters + gathered,
        shard.gradients,
        shard.optimizer,
        host * HOST_BUFFER_FACTOR,
    )
