"""What `fsdp.json` says, and that the engine does it: what is gathered, reduced and kept.

That it computes what the other engines compute is in test_parity.py.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from tests.engines.cases import CONFIG, Case, each_case, first_batch, new_engine, recipe
from tests.forked import call_ranks
from toolkit.engines.distributed import Ranks
from toolkit.engines.fsdp.config import render
from toolkit.engines.fsdp.engine import FsdpEngine
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.families import FAMILIES

LAYERS = CONFIG["num_hidden_layers"]
UNITS = LAYERS + 1
"""Decoder layers, and the rest of the model."""
UNTIED = {"tie_word_embeddings": False}
MICRO_BATCHES = 4
OWN_WORDS = {"replicate", "reduce_every_micro_batch"}
"""Of `fsdp.json`: a mesh's shape, and what is called before a backward pass."""
CASES = [
    Case("fsdp", 1, stage=3),
    Case("fsdp", 1, stage=2, precision="bf16"),
    Case("fsdp", 1, stage=1, precision="bf16"),
    Case("fsdp", 1, stage=3, offload="cpu", recompute="full"),
]


def test_the_words_are_those_of_the_installed_torch() -> None:
    config = render(Layout(zero_stage=3), "fp32")
    names = fully_shard.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    assert config.keys() - OWN_WORDS <= names.keys()
    MixedPrecisionPolicy(**config["mp_policy"])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_layers_are_found(family: str) -> None:
    """Without them the whole model would be gathered as one."""
    config = AutoConfig.for_model(family, num_hidden_layers=3)
    model = hf.meta_model(config)
    layers = hf.decoder_layers(model)
    assert len(layers) == 3
    for recompute, count in (("none", 0), (2, 2), ("full", 3)):
        hf.enable_recompute(model, recompute)  # type: ignore[arg-type]
        recomputed = [layer.gradient_checkpointing for layer in layers]
        assert recomputed == [True] * count + [False] * (3 - count)


COLLECTIVES = {
    "_allgather_base_": "gathered",
    "_reduce_scatter_base_": "reduced",
    "allreduce_": "summed",
}


class Counted(TorchDispatchMode):
    """How often parameters are gathered, and gradients reduced and, over copies of the shards,
    summed, by type of what is sent. Losses and norms are summed in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Counter[str]] = {w: Counter() for w in COLLECTIVES.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if word := COLLECTIVES.get(func.overloadpacket.__name__):
            sent = args[0][0] if word == "summed" else args[0]
            if sent.dtype != torch.float64:
                self.found[word][str(sent.dtype)] += 1
        return func(*args, **(kwargs or {}))


def sharded(engine: FsdpEngine) -> bool:
    """Is nothing gathered?"""
    return all(isinstance(p, DTensor) for p in engine.model.parameters())


def look(case: Case, ranks: Ranks) -> dict[str, Any]:
    """One step and one evaluation of a case."""
    with Counted() as while_built:
        engine, layout = new_engine(case, ranks)
    assert isinstance(engine, FsdpEngine)
    config = hf.build_config(recipe(case, ranks.world).model)
    reference = hf.empty_model(config, torch.device("cpu"))
    buffers = zip(engine.model.buffers(), reference.buffers(), strict=True)
    batches, count = first_batch(ranks, layout)
    with Counted() as in_step:
        engine.train_step(batches, count, 1e-3)
    after_step = sharded(engine)
    with Counted() as in_evaluation:
        engine.evaluate(batches)
    held = [shard.get("weight").numel() for shard in engine.state()]
    saved = sum(s.get("weight").numel() for s in engine.state() if s.saved_here)
    moments = [shard.get("exp_avg").dtype for shard in engine.state()]
    result = {
        "while_built": while_built.found,
        "in_step": in_step.found,
        "in_evaluation": in_evaluation.found,
        "sharded": [after_step, sharded(engine)],
        "buffers": all(torch.equal(a, b) for a, b in buffers),
        "held": [None] * ranks.world,
        "saved": [None] * ranks.world,
        "whole": sum(p.numel() for p in reference.parameters()),
        "moments": sorted({str(dtype) for dtype in moments}),
    }
    dist.all_gather_object(result["held"], sum(held))
    dist.all_gather_object(result["saved"], saved)
    engine.close()
    return result


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return call_ranks(each_case, 2, look, CASES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rank_ever_holds_the_whole_model(seen: dict[str, Any], case: Case) -> None:
    found = seen[case.name]
    assert found["while_built"] == {"gathered": {}, "reduced": {}, "summed": {}}
    assert sum(found["held"]) == found["whole"]
    assert max(found["held"]) < 0.51 * found["whole"]
    assert found["sharded"] == [True, True], "after a step and after an evaluation"
    assert found["buffers"], "rotary frequencies are transformers' own"
    assert found["moments"] == ["torch.float32"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_gathered_and_reduced_in_a_step(seen: dict[str, Any], case: Case) -> None:
    """Stage 3 gathers a layer for either pass of each micro batch, the others once a step; only
    stage 1 reduces gradients once a step."""
    computed_in = "torch.bfloat16" if case.precision == "bf16" else "torch.float32"
    gathered = MICRO_BATCHES * (UNITS + LAYERS) if case.stage == 3 else UNITS
    found = seen[case.name]
    assert found["in_step"] == {
        "gathered": {computed_in: gathered},
        "reduced": {"torch.float32": UNITS * (1 if case.stage == 1 else MICRO_BATCHES)},
        "summed": {},
    }
    evaluated = 1 + MICRO_BATCHES * LAYERS if case.stage == 3 else UNITS
    assert found["in_evaluation"]["gathered"] == {computed_in: evaluated}


@pytest.mark.slow
def test_embedding_and_head_are_gathered_by_themselves() -> None:
    """The backward pass needs no embedding, and at once the head. One that runs in chunks would
    be reduced after each of them."""
    whole = Case("fsdp", 1, stage=3, family=UNTIED, kernels={"loss": "whole"})
    chunked = Case("fsdp", 1, stage=3, family=UNTIED, kernels={"loss": "chunked"})
    found = call_ranks(each_case, 2, look, [whole, chunked])[0]
    for case, units in ((whole, LAYERS + 3), (chunked, LAYERS + 2)):
        assert found[case.name]["in_step"] == {
            "gathered": {"torch.float32": MICRO_BATCHES * (units + LAYERS)},
            "reduced": {"torch.float32": MICRO_BATCHES * units},
            "summed": {},
        }


@pytest.mark.slow
def test_copies_of_shards_sum_their_gradients_once_a_step() -> None:
    """Every shard is saved once."""
    case = Case("fsdp", 1, stage=3, parallel={"replicate": 2})
    found = call_ranks(each_case, 4, look, [case])[0][case.name]
    micro_batches = MICRO_BATCHES // 2
    assert found["in_step"] == {
        "gathered": {"torch.float32": micro_batches * (UNITS + LAYERS)},
        "reduced": {"torch.float32": micro_batches * UNITS},
        "summed": {"torch.float32": UNITS},
    }
    assert sum(found["held"]) == 2 * found["whole"]
    assert sum(found["saved"]) == found["whole"]
    pairs = found["saved"], found["held"]
    assert all(0 < saved < held for saved, held in zip(*pairs, strict=True))
