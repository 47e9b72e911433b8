"""One rank's engine on a GPU that is not there: built, trained, evaluated, saved, resumed."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import block_shape
from toolkit.engines.base import Counters, Engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.fsdp.config import DTYPES
from toolkit.engines.setup import EngineSetup, build_engine
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.models.families.tensors import Block
from toolkit.rehearse.gpu import device, others
from toolkit.rehearse.gpu.watch import MIXED, RankFindings, Watch
from toolkit.run.assignment import Assignment


@dataclass(frozen=True)
class NoWeights:
    """A weight source whose tensors have no elements."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of a flattened parameter."""
        del name
        return torch.empty(stop - start)

    def read_block(self, block: Block) -> Tensor:
        """A rectangle of a checkpoint tensor."""
        return torch.empty(block_shape(block))


def rehearse(
    assignment: Assignment,
    rank: int,
    mode: FakeTensorMode,
    changed: Callable[[Engine], None] = lambda _: None,
) -> RankFindings:
    """What `rank` does with this assignment, under the mode of `device.pretend`; once in a
    process.

    `changed` may change the engine before it trains. Tensors of two devices end it early; other
    errors of the engine are raised.
    """
    layout, recipe = assignment.plan.layout, assignment.recipe
    device.join(rank, layout.world)
    ranks = Ranks(rank, layout.world, 0, 1, device.GPU)
    config = hf.build_config(recipe.model)
    weights = NoWeights(hf.parameter_shapes(config))
    compute = getattr(torch, DTYPES[recipe.training.precision])
    spec = model_spec(config.to_dict())
    selects = spec.experts_per_token / spec.experts if spec.experts else 0.0
    watch = Watch(compute, _is_layer, selects)
    with mode, watch.watching():
        setup = EngineSetup.of(
            recipe, assignment.plan, assignment.engine_config, ranks, config, weights
        )
        engine = build_engine(assignment.plan.engine, setup)
        others.answer()
        changed(engine)
        try:
            _train(engine, assignment, watch)
        except RuntimeError as error:
            if not watch.found.of(MIXED):
                raise
            watch.found.ended_by = str(error).partition("\n")[0]
    return watch.found


def _train(engine: Engine, assignment: Assignment, watch: Watch) -> None:
    """A step, an evaluation, the state out and in again, and another step."""
    layout, recipe = assignment.plan.layout, assignment.recipe
    rows = layout.micro_batch * recipe.training.rows_per_sample
    tokens = torch.zeros(rows, recipe.training.sequence_length, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens)] * layout.gradient_accumulation
    count = float(layout.global_batch * recipe.training.sequence_length)
    watch.phase = "step"
    engine.train_step(batches, count, recipe.optimizer.learning_rate)
    watch.phase = "evaluate"
    engine.evaluate(batches)
    watch.phase = "state"
    held: Counter[str] = Counter()
    for shard in engine.state():
        for quantity in shard.quantities:
            held[quantity] += shard.get(quantity).numel()
    watch.found.state |= held
    _resume(engine)
    watch.phase = "resume"
    engine.train_step(batches, count, recipe.optimizer.learning_rate)


def _resume(engine: Engine) -> None:
    """Copy the state to the host as a save does, and put it back as a resumed run does."""
    for shard in engine.state():
        for quantity in shard.quantities:
            held = shard.get(quantity).to("cpu", copy=True)
            shard.put(quantity, torch.empty_like(held))
    engine.set_counters(Counters(engine.counters().optimizer_steps))


def _is_layer(module: nn.Module) -> bool:
    """Is it a decoder layer, of either model implementation?"""
    return isinstance(module, GradientCheckpointingLayer) or (
        type(module).__name__ == "TransformerLayer"
    )
