"""Small cases of the engines' tests, what each rank does for one, the plain run that all are
compared with (`toolkit.rehearse.reference`), and how near to it they must be.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tests.engines.pairs import DENSE
from tests.forked import call_ranks
from tests.models.small import VOCABULARY
from toolkit.backend import BACKENDS
from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.checkpoint.export import COMPANIONS, DTYPES
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.engines.base import Counters, Engine, StepResult
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.engines.setup import EngineSetup
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.adapters.weights import AdaptedWeights, fingerprint, first_weights
from toolkit.models.weights import WeightSource
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe, TrainingSection
from toolkit.rehearse.batches import global_batch, micro_batches
from toolkit.rehearse.reference import plain_run

STEPS = 4
"""Enough for a wrong moment, weight or mask to show above rounding: most show at the second."""
LENGTH = 16
TRAINING = TrainingSection(steps=STEPS, sequence_length=LENGTH, global_batch_size=8)
"""Of each case, but for its precision and its micro batch."""
RATE = 1e-3
WIDE = {"hidden_size": 512, "vocab_size": 4096, "num_hidden_layers": 1}
"""Large enough that DeepSpeed swaps it to disk: it keeps tensors below 1 MiB in memory."""
CONFIG = DENSE | {"num_hidden_layers": 2}
TOLERANCE = 1e-5
OFFLOAD_TOLERANCE = 1e-4
"""DeepSpeed's C++ Adam rounds differently from torch's."""


@dataclass(frozen=True)
class Case:
    """One layout to train in."""

    engine: str
    micro_batch: int
    stage: int | str = "auto"
    offload: str = "none"
    precision: str = "fp32"
    recompute: str | int = "none"
    steps: int = STEPS
    # Settings of the recipe's sections, besides those above.
    parallel: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    adapter: dict[str, Any] | None = None
    balance: dict[str, Any] | None = None
    freeze: tuple[str, ...] = ()
    kernels: dict[str, str] = field(default_factory=dict)
    """Nothing is compiled or fused unless they say so."""
    family: dict[str, Any] = field(default_factory=dict)
    """Further keys of the model's config; with `vocab_size` and `model_type`, all of them."""
    gpu: str = "cpu"
    """For which it is planned."""
    resume_in: str | None = None
    """Folder: half-way, save there, go on in a new engine with other initial weights."""
    bucket: int | None = None
    """Gradients that megatron-core reduces at once, instead of its 40 million."""

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.get("learning_rate", RATE))

    @property
    def name(self) -> str:
        """Of a folder; `repr` is what a reader wants."""
        return f"{self.engine}-{crc32(repr(self).encode()):08x}"


LAYERS = {"num_hidden_layers": 5}

MIXTRAL = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

GLM = {
    "model_type": "glm4_moe", "num_hidden_layers": 3, "n_routed_experts": 8, "head_dim": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
"""Sigmoid scores, correction biases, and one dense layer."""
BIAS = {"kind": "bias", "coefficient": 0.05, "bias_update": 0.02, "z_loss": 0.0}
"""The balancing of GLM."""


def megatron(micro_batch: int = 2, family: dict[str, Any] = LAYERS, **parallel: Any) -> Case:
    """A case of the engine megatron."""
    stage = parallel.pop("stage", "auto")
    recompute = parallel.pop("recompute", "none")
    return Case(
        "megatron", micro_batch, stage, recompute=recompute, family=family,
        parallel=parallel,
    )  # fmt: skip


def zero(stage: int, offload: str = "none", recompute: str = "none", **family: Any) -> Case:
    """A case of the engine deepspeed with a Megatron model in tensor 2."""
    return Case(
        "deepspeed", 2, stage, offload, recompute=recompute,
        family=family or LAYERS, parallel={"model": "megatron", "tensor": 2},
    )  # fmt: skip


def recipe(case: Case, world: int) -> Recipe:
    """The same recipe for every case but for the layout."""
    whole = {"vocab_size", "model_type"} <= case.family.keys()
    return Recipe.model_validate(
        {
            "name": "parity",
            "model": {
                "config": case.family if whole else CONFIG | case.family,
                "freeze": case.freeze,
                "balance": case.balance,
            },
            "adapter": case.adapter,
            "data": {
                "train": {"kind": "text", "files": ["unused"]},
                "isolate_documents": False,
            },
            "training": TRAINING.model_dump()
            | {
                "steps": case.steps,
                "micro_batch_size": case.micro_batch,
                "precision": case.precision,
            },
            # An eps above what rounding makes of a gradient that is 0, or AdamW makes a step
            # of it.
            "optimizer": {
                "learning_rate": RATE,
                "eps": 1e-6,
                "clip_grad_norm": 1.0,
                "groups": case.groups,
                **case.optimizer,
            },
            "parallel": {
                "engine": case.engine,
                "recompute": case.recompute,
                **case.parallel,
                "zero": {
                    "stage": case.stage,
                    "offload_optimizer": case.offload,
                    "offload_parameters": case.offload if case.stage == 3 else "none",
                    **case.zero,
                },
            },
            "kernels": {"compile": "none", "fused": "none", **case.kernels},
            "cluster": {"gpus_per_node": world, "gpu": case.gpu},
        }
    )


def global_batches(steps: int) -> list[MicroBatch]:
    """Batches with very uneven masks."""
    return [MicroBatch(*global_batch(TRAINING, VOCABULARY, step)) for step in range(steps)]


def share(batch: MicroBatch, layout: Layout, ranks: Ranks) -> tuple[list[MicroBatch], int]:
    """This rank's micro batches of a global batch, and the tokens that count in all of it."""
    return micro_batches(batch, layout, layout.data_rank(ranks.rank)), batch.tokens


def first_batch(ranks: Ranks, layout: Layout) -> tuple[list[MicroBatch], int]:
    """See `share`."""
    (batch,) = global_batches(1)
    return share(batch, layout, ranks)


def reference(case: Case) -> dict[str, list[float]]:
    """Loss and gradient norm of each step of the case's model, trained by transformers, PEFT
    and torch in this process."""
    fp8 = {"fp8": case.kernels["fp8"]} if "fp8" in case.kernels else {}
    plain = Case(
        "ddp", TRAINING.global_batch_size, steps=case.steps, family=case.family,
        freeze=case.freeze, adapter=case.adapter, balance=case.balance, groups=case.groups,
        optimizer=case.optimizer, kernels=fp8,
    )  # fmt: skip
    return _plain_curves(recipe(plain, world=1).model_dump_json())


@cache
def _plain_curves(plain: str) -> dict[str, list[float]]:
    wanted = Recipe.model_validate_json(plain)
    assert wanted.training.steps is not None
    losses, norms = zip(*plain_run(wanted, global_batches(wanted.training.steps)), strict=True)
    return {"loss": [*losses], "grad_norm": [*norms]}


def plain_model(case: Case) -> PreTrainedModel:
    """transformers' model with the weights that every engine starts with."""
    wanted = recipe(case, world=1)
    config = hf.build_config(wanted.model)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(wanted.model, config, wanted.training.seed))
    return model


@torch.no_grad()
def loss_of(model: Any, batch: MicroBatch) -> float:
    """The loss of a model, by transformers alone."""
    logits, labels = model(batch.input_ids).logits.flatten(0, 1), batch.labels.flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORE_INDEX).item()


def new_engine(
    case: Case, ranks: Ranks, checkpoint: Path | None = None
) -> tuple[Engine, Layout]:
    """The engine of a case, built as the worker builds it: to start, or to continue."""
    wanted = recipe(case, ranks.world)
    plan, config = plan_recipe(wanted), hf.build_config(wanted.model)
    rendered = BACKENDS[plan.engine].render(wanted, plan.layout)
    if case.bucket is not None:
        rendered["ddp"]["bucket_size"] = case.bucket
    weights = first_weights(wanted, config)
    if checkpoint is not None:
        weights = _saved_weights(weights, SavedState(checkpoint))
    setup = EngineSetup.of(wanted, plan, rendered, ranks, config, weights)
    engine = build_engine(plan.engine, setup)
    if checkpoint is not None:
        saved, manifest = SavedState(checkpoint), Manifest.read(checkpoint)
        for shard in engine.state():
            saved.load(shard)
        engine.set_counters(Counters(manifest.optimizer_steps, manifest.loss_scale))
    return engine, plan.layout


def _saved_weights(first: WeightSource, saved: SavedState) -> WeightSource:
    """Those of a checkpoint in place of the first ones, which a base of adapters keeps."""
    if isinstance(first, AdaptedWeights):
        return AdaptedWeights(first.base, SavedWeights(saved, first.adapters.shapes))
    return SavedWeights(saved, first.shapes)


def steps(
    engine: Engine, layout: Layout, ranks: Ranks, first: int, last: int, rate: float = RATE
) -> list[StepResult]:
    """Train steps [first, last)."""
    results = []
    for step, batch in enumerate(global_batches(last)[first:], first):
        torch.manual_seed(step)  # as the training loop does, for dropout
        results.append(engine.train_step(*share(batch, layout, ranks), rate))
    return results


def curves(results: Sequence[StepResult]) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
    }


def train(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train one case; loss, gradient norm and what else is logged per step. The last batch is
    evaluated before it is trained: the same loss, with the weights of the step before."""
    engine, layout = new_engine(case, ranks)
    half = case.steps // 2
    results = steps(engine, layout, ranks, 0, half, case.learning_rate)
    if case.resume_in is not None:
        folder = Path(case.resume_in) / case.name
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = write_state(case, ranks, engine, half, folder)
        engine.close()
        engine, layout = new_engine(case, ranks, checkpoint)
    last = case.steps - 1
    results += steps(engine, layout, ranks, half, last, case.learning_rate)
    batch = global_batches(case.steps)[last]
    evaluated = engine.evaluate(share(batch, layout, ranks)[0])
    results += steps(engine, layout, ranks, last, case.steps, case.learning_rate)
    assert engine.counters().optimizer_steps == case.steps
    assert evaluated.tokens == batch.tokens, "counted by every rank"
    near = TOLERANCE if case.precision == "fp32" else 1e-3
    assert evaluated.loss == pytest.approx(results[last].loss, rel=near), case
    engine.close()
    return {**curves(results), "metrics": [dict(result.metrics) for result in results]}


def write_state(case: Case, ranks: Ranks, engine: Engine, step: int, folder: Path) -> Path:
    """A checkpoint of the engine's state in `folder`; its path, on every rank."""
    wanted = recipe(case, ranks.world)
    plan, config = plan_recipe(wanted), hf.build_config(wanted.model)
    counters, first = engine.counters(), first_weights(wanted, config)
    manifest = Manifest(
        step=step, consumed_samples=step * TRAINING.global_batch_size, data_fingerprint="",
        optimizer_steps=counters.optimizer_steps, loss_scale=counters.loss_scale, versions={},
        engine=plan.engine, model=plan.model, layout=plan.layout, recent_losses=(),
        recipe=wanted.model_dump(mode="json"),
        base=fingerprint(first.base) if isinstance(first, AdaptedWeights) else None,
    )  # fmt: skip
    companions = {}
    if ranks.rank == 0:
        with TemporaryDirectory() as made:
            hf.save_companions(config, DTYPES.get(case.precision, torch.float32), Path(made))
            files = Path(made).iterdir()
            companions = {f"{COMPANIONS}/{file.name}": file.read_bytes() for file in files}
    saver = Saver(CheckpointStore(folder, keep=1), asynchronous=True)
    saver.save(manifest, engine.state(), companions)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None and saved.problem is None, saved
    return folder / folder_name(step)


def each_case(
    ranks: Ranks, do: Callable[[Case, Ranks], Any], cases: Sequence[Case]
) -> dict[str, Any]:
    """What a rank does for one case after the other, by their names."""
    results = {}
    for case in cases:
        results[case.name] = do(case, ranks)
        gc.collect()  # process groups of closed engines, each with a thread that polls
    return results


def alone(do: Callable[[Case, Ranks], Any], cases: Sequence[Case]) -> dict[str, Any]:
    """The main program of a rank of its own process group: see `each_case`."""
    ranks = join()
    results = each_case(ranks, do, cases)
    leave()
    return results


def run(cases: list[Case], world: int) -> dict[str, Any]:
    """Train `cases` one after the other in one group of `world` real processes."""
    return call_ranks(each_case, world, train, cases)[0]


def assert_curves(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    tolerance: float = TOLERANCE,
    name: str = "",
) -> None:
    """Loss and gradient norm of each step are those of the reference."""
    for quantity in ("loss", "grad_norm"):
        wanted = pytest.approx(expected[quantity], rel=tolerance)
        assert found[quantity] == wanted, f"{quantity} {name}"
