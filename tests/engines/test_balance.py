"""`model.balance` in every layout, compared with a plain loop of transformers and torch."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engines.cases import BIAS, GLM, MIXTRAL, TOLERANCE, megatron, run
from tests.engines.parity_worker import (
    GLOBAL_BATCH,
    VOCABULARY,
    Case,
    clipped,
    global_batches,
    reference_model,
)
from tests.models.configs import SMALL
from toolkit.batch import IGNORE_INDEX

STEPS = 6
SEQUENCE_LOSS = {"kind": "sequence_loss", "coefficient": 0.05, "z_loss": 0.02}
"""Large enough that a part of a term that is missing is seen in the norm."""
LLAMA4 = SMALL | {
    "model_type": "llama4_text", "vocab_size": VOCABULARY, "num_local_experts": 4,
    "head_dim": 16, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2,
}  # fmt: skip
"""Sigmoid scores without biases, of which none is more than the experts' own weight."""
FAMILIES = {one["model_type"]: one for one in (MIXTRAL, GLM, LLAMA4)}
"""One of each way to score; tests/models/test_routers.py has every type."""


def balanced(case: Case, **settings: Any) -> Case:
    return replace(case, steps=STEPS, balance=settings or SEQUENCE_LOSS)


def biased(case: Case) -> Case:
    return replace(case, steps=STEPS, balance=BIAS, family=GLM)


CASES = {
    1: [
        balanced(Case("ddp", 8, recompute="full", family=MIXTRAL)),
        biased(Case("ddp", 4)),
        balanced(Case("ddp", 4, family=LLAMA4)),
    ],
    2: [
        balanced(Case("fsdp", 1, family=MIXTRAL)),
        balanced(Case("deepspeed", 2, 1, recompute="full", family=MIXTRAL)),
        biased(Case("deepspeed", 2, 3, recompute="full")),
        balanced(megatron(pipeline=2, micro_batch=1, recompute="full", family=MIXTRAL)),
        biased(megatron(expert=2)),
        balanced(megatron(context=2, expert=2, family=MIXTRAL)),
    ],
}
"""What is logged is compared here, and the biases; all layouts are in test_pairs.py."""


@cache
def reference(model_type: str) -> dict[str, Any]:
    """Loss, gradient norm and what is logged, of whole global batches; the last biases."""
    family = FAMILIES[model_type]
    settings = BIAS if family is GLM else SEQUENCE_LOSS
    model, optimizer = reference_model(Case("ddp", GLOBAL_BATCH, family=family))
    gates = {
        name: part
        for name, part in model.named_modules()
        if name.endswith(("mlp.gate", "feed_forward.router"))
    }
    logits = 1 if model_type == "llama4_text" else 0
    seen: dict[str, torch.Tensor] = {}
    for name, gate in gates.items():
        gate.register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out[logits]})
        )
    found: dict[str, Any] = {}
    for inputs, labels in global_batches(STEPS):
        output = model(inputs, use_cache=False)
        loss = cross_entropy(
            output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )
        layers = [Layer(gate, seen[name], labels) for name, gate in gates.items()]
        balance = sum(layer.balance() for layer in layers) * settings["coefficient"]
        z = sum(layer.z() for layer in layers) * settings["z_loss"]
        optimizer.zero_grad()
        (loss + balance + z).backward()
        entropies = torch.cat([layer.entropies() for layer in layers])
        values = {
            "loss": loss.item(),
            "grad_norm": clipped(model),
            "balance_loss": balance.item(),
            "router_z_loss": z.item(),
            "busiest_expert": max(layer.busiest() for layer in layers),
            "router_entropy": entropies.mean().item(),
            "dropped_tokens": 0.0,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        optimizer.step()
        if settings is BIAS:
            for layer in layers:
                layer.move(settings["bias_update"])
    biases = {
        name: buffer.tolist() for name, buffer in model.named_buffers() if "correction" in name
    }
    return found | {"biases": biases}


class Layer:
    """A router's logits of a global batch, one row at a time, without what follows the last
    trained label."""

    def __init__(self, gate: Any, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.bias = getattr(gate, "e_score_correction_bias", None)
        self.per_token = gate.top_k
        self.softmax = type(gate).__name__.startswith("Mixtral")
        self.rows = []
        for row, label in zip(logits.chunk(GLOBAL_BATCH), labels.tolist(), strict=True):
            trained = [at for at, one in enumerate(label) if one != IGNORE_INDEX]
            self.rows.append(row[: trained[-1] + 1] if trained else row[:0])

    def scores(self, row: torch.Tensor) -> torch.Tensor:
        if self.softmax:
            return row.softmax(-1)
        return row.sigmoid() / row.sigmoid().sum(-1, keepdim=True)

    def counts(self, row: torch.Tensor) -> torch.Tensor:
        chosen = row if self.bias is None else row.sigmoid() + self.bias
        return chosen.topk(self.per_token).indices.flatten().bincount(minlength=row.shape[-1])

    def balance(self) -> torch.Tensor:
        terms = [
            (self.counts(row) * self.scores(row).mean(0)).sum()
            * row.shape[-1]
            / (self.per_token * len(row))
            for row in self.rows
            if len(row)
        ]
        return sum(terms) / len(self.rows)

    def z(self) -> torch.Tensor:
        terms = [row.exp().sum(-1).log().pow(2).mean() for row in self.rows if len(row)]
        return sum(terms) / len(self.rows)

    def entropies(self) -> torch.Tensor:
        scores = self.scores(torch.cat(self.rows))
        return torch.distributions.Categorical(probs=scores).entropy()

    def busiest(self) -> float:
        counts = self.counts(torch.cat(self.rows))
        return (counts.max() / counts.double().mean()).item()

    def move(self, step: float) -> None:
        counts = self.counts(torch.cat(self.rows)).double()
        self.bias += step * (counts.mean() - counts).sign()


def check(model_type: str, result: dict[str, Any]) -> None:
    expected = dict(reference(model_type))
    biases = expected.pop("biases")
    logged = {name: [step[name] for step in result["metrics"]] for name in result["metrics"][0]}
    found = logged | {name: result[name] for name in ("loss", "grad_norm")}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE), name
    assert result["biases"].keys() == biases.keys()
    for name, values in biases.items():
        assert result["biases"][name] == pytest.approx(values, abs=1e-6), name
    assert all(max(map(abs, values)) > 0.03 for values in biases.values()), "they moved"


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layouts_equal_a_plain_loop(world: int) -> None:
    for case, (name, result) in zip(
        CASES[world], run(CASES[world], world).items(), strict=True
    ):
        print(name)
        check(case.family["model_type"], result)
