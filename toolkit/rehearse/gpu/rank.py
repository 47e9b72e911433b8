"""One rank's engine on a fake GPU: built, and trained for two steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.backend import BACKENDS
from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import block_shape
from toolkit.engines.base import Engine
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.setup import EngineSetup
from toolkit.intake.load import load_recipe
from toolkit.models import compiled
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.models.families.tensors import Block
from toolkit.rehearse.gpu import Peak, device
from toolkit.rehearse.gpu.account import Account
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


def rehearse(assignment: Assignment, rank: int, mode: FakeTensorMode) -> Peak:
    """The peak memory of `rank` in one step, under the mode of `device.pretend`.

    Call it once in a process. A step before creates the optimizer's states. Raises what the
    engine raises. If an operator gets tensors of two devices, torch raises RuntimeError.
    """
    layout, recipe = assignment.plan.layout, assignment.recipe
    world, samples = layout.world, layout.micro_batches[layout.data_rank(rank)]
    engine_name = assignment.plan.engine
    device.join(rank, world)
    ranks = Ranks(rank, world, 0, 1, device.GPU)
    config = hf.build_config(recipe.model)
    weights = NoWeights(hf.parameter_shapes(config))
    spec = model_spec(config.to_dict())
    account = Account(spec.experts_per_token / spec.experts if spec.experts else 0.0)
    device.import_engine(BACKENDS[engine_name].engine)
    with mode, account.following(), compiled.eager():
        setup = EngineSetup.of(
            recipe, assignment.plan, assignment.engine_config, ranks, config, weights
        )
        # What a probe compares are numbers, which these tensors lack.
        engine = build_engine(engine_name, setup, probe=False)
        device.answer_libraries()
        account.own(_modules(engine))
        for _ in range(2):
            account.begin()
            _step(engine, assignment, samples)
    return account.peak()


def _modules(engine: Any) -> list[nn.Module]:
    """The model of an engine of any kind, or its chunks."""
    chunks = getattr(engine, "chunks", None)
    return chunks or [getattr(engine.model, "module", engine.model)]


def _step(engine: Engine, assignment: Assignment, samples: int) -> None:
    layout, recipe = assignment.plan.layout, assignment.recipe
    rows, length = samples * recipe.training.rows_per_sample, recipe.training.sequence_length
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    reads = [
        name for name in recipe.objective().reads if name not in MicroBatch.__annotations__
    ]
    extra = {name: torch.zeros(rows) for name in reads}  # a number per row
    batches = [MicroBatch(tokens, tokens, extra=extra)] * layout.gradient_accumulation
    count = float(layout.global_batch * length)
    engine.train_step(batches, count, recipe.optimizer.learning_rate)
