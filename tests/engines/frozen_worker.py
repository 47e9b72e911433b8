"""What every rank of test_frozen.py does: train, and look into the real optimizers."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines.parity_worker import (
    SEED,
    Case,
    curves,
    first_batch,
    new_engine,
    recipe,
    steps,
    write_state,
)
from toolkit.checkpoint.export import DTYPES
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_block
from toolkit.checkpoint.verify import verify
from toolkit.engines.distributed import Ranks
from toolkit.models import huggingface as hf

STEPS = 4


def look(folder: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """A few steps of a case, its checkpoint, and what its optimizer holds on this rank."""
    engine, layout = new_engine(case, ranks, SEED)
    found = curves(steps(engine, layout, ranks, 0, STEPS))
    parameters = list(parameters_of(engine))
    trained = sum(numel_of(p) for p in parameters if p.requires_grad)
    moments = sum(
        local(state["exp_avg"]).numel()
        for adam in adams_of(engine)
        for state in adam.state.values()
    )
    checkpoint = write_state(case, ranks, engine, STEPS, Path(folder) / case.name)
    result = {
        **found,
        "gradients": sum(p.grad is not None for p in parameters if not p.requires_grad),
        "trained": trained,
        "frozen": sum(numel_of(p) for p in parameters) - trained,
        "moments": moments * shares_of(case, ranks.world),
        "buffers": sum(buffer.grad_data.numel() for buffer in buffers_of(engine)),
        "checkpoint": saved(case, checkpoint) if ranks.rank == 0 else None,
    }
    engine.evaluate(first_batch(ranks, layout)[0])
    engine.close()
    return result


def shares_of(case: Case, world: int) -> int:
    """Ranks that the optimizer states of one model-parallel rank are spread over."""
    spread = case.engine in ("deepspeed", "fsdp", "megatron") and case.stage not in (0, "auto")
    degrees = (case.parallel.get(name, 1) for name in ("tensor", "pipeline"))
    return world // prod(degrees) if spread else 1


def parameters_of(engine: Any) -> Iterator[nn.Parameter]:
    """The parameters of this rank's part of the model."""
    if hasattr(engine, "shards"):  # FSDP2
        yield from engine.shards.values()
        return
    modules = getattr(engine, "chunks", None) or [getattr(engine.model, "module", engine.model)]
    for module in modules:
        yield from module.parameters()


def numel_of(parameter: Any) -> int:
    """Elements of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def adams_of(engine: Any) -> Iterator[Any]:
    """torch's or DeepSpeed's own AdamWs, without what is around them."""
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    yield from filter(None, (getattr(part, "optimizer", part) for part in parts))


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def buffers_of(engine: Any) -> Iterator[Any]:
    """megatron-core's gradient buffers."""
    for replica in getattr(engine, "replicas", ()):
        yield from (*replica.buffers, *replica.expert_parallel_buffers)


def saved(case: Case, checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds: of each tensor the quantities, and whether it is as at first."""
    wanted = recipe(case, 1)
    config = hf.build_config(wanted.model)
    first = hf.weight_source(wanted.model, config, SEED)
    state = SavedState(checkpoint)
    blocks = {name: whole_block(name, shape) for name, shape in state.shapes.items()}
    return {
        "problems": verify(checkpoint).problems,
        "quantities": {name: state.quantities(name) for name in blocks},
        "unchanged": {
            name: torch.equal(state.read("weight", block), held(case, first.read_block(block)))
            for name, block in blocks.items()
        },
    }


def held(case: Case, weight: torch.Tensor) -> torch.Tensor:
    """A frozen weight as every engine keeps it: rounded to the precision of training."""
    return weight.to(DTYPES.get(case.precision, torch.float32)).float()
