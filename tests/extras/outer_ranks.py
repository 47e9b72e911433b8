"""What every rank of test_outer.py does with one engine: other weights are put into it."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.engines.parity_worker import (
    SEED,
    Case,
    first_batch,
    global_batches,
    loss_of,
    micro_batches,
    new_engine,
    recipe,
)
from toolkit.checkpoint.shards import whole_block
from toolkit.engines.distributed import Ranks
from toolkit.extras.outer.weights import WholeWeights
from toolkit.models import huggingface as hf
from toolkit.models.frozen import matching
from toolkit.models.weights import WeightSource

FACTOR = 3.0
"""Of the other weights, so that their loss is another one."""


def other_weights(case: Case, world: int, seed: int = SEED + 1) -> tuple[WeightSource, Any]:
    """Weights of another seed, and the model's config."""
    wanted = recipe(case, world)
    config = hf.build_config(wanted.model)
    return hf.weight_source(wanted.model, config, seed), config


def plain_loss(case: Case, world: int) -> float:
    """The loss with the other weights, but for the frozen ones, by transformers alone."""
    weights, config = other_weights(case, world)
    first, _ = other_weights(case, world, SEED)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            frozen = matching(case.freeze, [name])
            values = (first if frozen else weights).read(name, 0, parameter.numel())
            parameter.copy_((1 if frozen else FACTOR) * values.view_as(parameter))
    return loss_of(model, *next(global_batches(1)))


def follow(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train a step, put the other weights in, and evaluate; then one more step."""
    engine, layout = new_engine(case, ranks, SEED)
    batches, count = first_batch(ranks, layout)
    engine.train_step(batches, count, 1e-3)
    group = dist.new_group(backend="gloo")
    parts = WholeWeights(engine, recipe(case, ranks.world), group)
    weights, _ = other_weights(case, ranks.world)
    values = {
        name: (FACTOR * weights.read_block(whole_block(name, shape))).numpy()
        for name, shape in parts.shapes.items()
    }
    parts.scatter(values if ranks.rank == 0 else {})
    batches = micro_batches(*next(global_batches(1)), ranks, layout)
    loss = engine.evaluate(batches).loss
    again = parts.gather()
    kept = all((again[name] == values[name]).all() for name in again)
    first = engine.train_step(batches, count, 1e-3).loss
    engine.close()
    return {"loss": loss, "trained": first, "kept": kept}
