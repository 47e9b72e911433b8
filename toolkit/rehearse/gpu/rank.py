"""One rank's engine on a fake GPU: built, trained, evaluated, saved, resumed."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.backend import BACKENDS
from toolkit.batch import MicroBatch
from toolkit.checkpoint.copies import HostCopies
from toolkit.checkpoint.shards import block_shape
from toolkit.engines.base import Counters, Engine
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.fsdp.config import DTYPES
from toolkit.engines.setup import EngineSetup
from toolkit.intake.load import load_recipe
from toolkit.launchers.job import expandable_segments
from toolkit.models import compiled
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.models.families.tensors import Block
from toolkit.rehearse.gpu import device, others
from toolkit.rehearse.gpu.findings import MIXED, PHASES, STEP, RankFindings, SaveCopies
from toolkit.rehearse.gpu.watch import Watch
from toolkit.run.assignment import Assignment, read_assignment
from toolkit.run.directory import RunDirectory


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


def read(run_dir: Path) -> Assignment:
    """The assignment of a run directory, for any number of ranks."""
    recipe = load_recipe(RunDirectory(run_dir).recipe)
    return read_assignment(run_dir, recipe.cluster.world_size)


def rehearse(
    assignment: Assignment,
    rank: int,
    mode: FakeTensorMode,
    changed: Callable[[Engine], None] = lambda _: None,
    *,
    skip: Collection[str] = (),
) -> RankFindings:
    """What `rank` does with this assignment, under the mode of `device.pretend`; once in a
    process.

    `skip` names phases to leave out: `step`, the first one, or `evaluate`. `changed` may change
    the engine before it trains. Tensors of two devices end it early; other errors of the engine
    are raised.
    """
    layout, recipe = assignment.plan.layout, assignment.recipe
    world, samples = layout.world, layout.micro_batches[layout.data_rank(rank)]
    if BACKENDS[assignment.plan.engine].rehearsed_alone(recipe.training.precision):
        rank, world = 0, 1
    device.join(rank, world)
    ranks = Ranks(rank, world, 0, 1, device.GPU)
    config = hf.build_config(recipe.model)
    weights = NoWeights(hf.parameter_shapes(config))
    compute = getattr(torch, DTYPES[recipe.training.precision])
    spec = model_spec(config.to_dict())
    selects = spec.experts_per_token / spec.experts if spec.experts else 0.0
    watch = Watch(compute, _is_layer, selects)
    others.before(BACKENDS[assignment.plan.engine].engine)
    with mode, watch.watching(), compiled.eager():
        setup = EngineSetup.of(
            recipe, assignment.plan, assignment.engine_config, ranks, config, weights
        )
        # What a probe compares are numbers, which these tensors lack.
        engine = build_engine(assignment.plan.engine, setup, probe=False)
        others.answer()
        changed(engine)
        watch.account.own(_modules(engine))
        try:
            _train(engine, assignment, samples, watch, skip)
        except RuntimeError as error:
            if not watch.found.of(MIXED):
                raise
            watch.found.ended_by = str(error).partition("\n")[0]
    ended = watch.found.ended_by is not None
    phases = [] if ended else [one for one in PHASES if one not in skip]
    watch.found.peaks = {phase: watch.account.peak(phase) for phase in phases}
    if not ended:
        expandable = expandable_segments(assignment.recipe)
        watch.found.reserved, watch.found.least = watch.account.reserved(expandable=expandable)
    watch.found.flops = dict(watch.account.flops.get(STEP, Counter()).most_common())
    return watch.found


def _modules(engine: Any) -> list[nn.Module]:
    """The model of an engine of any kind, or its chunks."""
    chunks = getattr(engine, "chunks", None)
    return chunks or [getattr(engine.model, "module", engine.model)]


def _train(
    engine: Engine, assignment: Assignment, samples: int, watch: Watch, skip: Collection[str]
) -> None:
    """A step, an evaluation, the state out and in again, and another step."""
    layout, recipe = assignment.plan.layout, assignment.recipe
    rows, length = (samples * recipe.training.rows_per_sample, recipe.training.sequence_length)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    reads = [
        name for name in recipe.objective().reads if name not in MicroBatch.__annotations__
    ]
    extra = {name: torch.zeros(rows) for name in reads}  # a number per row
    batches = [MicroBatch(tokens, tokens, extra=extra)] * layout.gradient_accumulation
    count = float(layout.global_batch * length)
    if "step" not in skip:
        watch.begin("step")
        engine.train_step(batches, count, recipe.optimizer.learning_rate)
    if "evaluate" not in skip:
        watch.begin("evaluate")
        engine.evaluate(batches if layout.pp > 1 else batches[:1])
    watch.begin("state")
    held: Counter[str] = Counter()
    for shard in engine.state():
        for quantity in shard.quantities:
            held[quantity] += shard.get(quantity).numel()
    watch.found.state |= held
    _resume(engine)
    watch.begin("save")
    saved = _save(engine, adapter=recipe.adapter is not None)
    if dist.get_world_size() == layout.world:
        watch.found.saved = saved
    watch.begin(STEP)
    engine.train_step(batches, count, recipe.optimizer.learning_rate)


def _resume(engine: Engine) -> None:
    """Put a state in host memory into the engine, as a resumed run does."""
    for shard in engine.state():
        for quantity in shard.quantities:
            held = shard.get(quantity)
            shard.put(quantity, torch.empty_like(held, device="cpu"))
    engine.set_counters(Counters(engine.counters().optimizer_steps))


def _save(engine: Engine, *, adapter: bool) -> SaveCopies:
    """Copy the state to the host, as a save does; with an `adapter`, only what trains."""
    copies = HostCopies()
    copies.begin()
    found: list[tuple[int, str]] = []
    for shard in engine.state():
        if shard.saved_here and (shard.trains or not adapter):
            for quantity in shard.quantities:
                values = shard.get(quantity)
                found.append((values.nbytes, values.device.type))
                if shard.in_memory:
                    copies.of(values)
    copies.end()  # the thread that writes waits for what this returns
    from_gpu = sum(nbytes for nbytes, kind in found if kind == device.GPU.type)
    return SaveCopies(sum(nbytes for nbytes, _ in found), from_gpu, len(found))


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a decoder layer of either model implementation."""
    return isinstance(module, GradientCheckpointingLayer) or (
        type(module).__name__ == "TransformerLayer"
    )
