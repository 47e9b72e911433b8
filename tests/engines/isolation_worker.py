"""What every rank of test_isolation.py does: train packed rows, and build what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig

from tests.engines.pairs import recorded
from tests.engines.parity_worker import SEED, VOCABULARY, Case, recipe
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.models import huggingface as hf
from toolkit.models.context import Context
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.worker import small_run
from toolkit.run.assignment import decide


def train(ranks: Ranks, recipes: Sequence[Recipe]) -> list[Record]:
    """Each engine looks for leaks by itself before it trains."""
    return [recorded(small_run(decide(one, None), ranks)) for one in recipes]


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Models in which something runs along the row besides attention: a state, a convolution."""


class OwnWeights:
    """The weights that a transformers model was initialised with."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = {name: p.detach().flatten() for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._values[name][start:stop]


def context_refusals(ranks: Ranks) -> dict[str, str]:
    """What context parallel is refused with, by type: also where positions are lost."""
    spread = Case("ddp", 2, parallel={"context": 2})
    found = {one: refusal(one, ranks, spread) for one in ("qwen3", *RECURRENT, "bloom")}
    part = Context.part
    with patch.object(Context, "part", lambda *rows: replace(part(*rows), positions=None)):
        return found | {"llama": refusal("llama", ranks, spread)}


def refusal(model_type: str, ranks: Ranks, case: Case) -> str:
    """What building an engine of this type for the case is refused with."""
    wanted = recipe(case, ranks.world)
    small = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **small, **RECURRENT.get(model_type, {}))
    config._experts_implementation = "eager"
    torch.manual_seed(SEED)
    weights: Any = OwnWeights(hf.new_model(config, torch.float32))
    plan = plan_recipe(wanted)
    setup = EngineSetup.of(wanted, plan, {}, ranks, config, weights)
    try:
        build_engine("ddp", setup).close()
    except PlanError as error:
        return str(error)
    return "accepted"
