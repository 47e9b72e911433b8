"""What every rank of test_parity.py does: train each case in turn.

`reference` is what all of them are compared with: transformers and torch alone.
"""

import gc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

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
from toolkit.models.adapters.lora import lora_of
from toolkit.models.adapters.weights import AdaptedWeights, LoraWeights, fingerprint
from toolkit.models.weights import WeightSource, is_correction_bias
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe

STEPS = 6
"""Enough for a wrong moment, weight or mask to show above rounding: most show at the second."""
SEED = 1234
GLOBAL_BATCH = 8
LENGTH = 16
VOCABULARY = 101
WIDE = {"hidden_size": 512, "vocab_size": 4096, "num_hidden_layers": 1}
"""Large enough that DeepSpeed swaps it to disk: it keeps tensors below 1 MiB in memory."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One layout to train in."""

    engine: str
    micro_batch: int
    stage: int | str = "auto"
    offload: str = "none"
    precision: str = "fp32"
    recompute: str | int = "none"
    nvme_path: str | None = None
    steps: int = STEPS
    wide: bool = False
    parallel: dict[str, Any] = field(default_factory=dict)
    """Further settings of the recipe's `parallel` section."""
    zero: dict[str, Any] = field(default_factory=dict)
    """Further settings of its `zero` section."""
    family: dict[str, Any] = field(default_factory=dict)
    """Further keys of the model's config; with `vocab_size`, all of them."""
    resume_in: str | None = None
    """Folder: half-way, save there, go on in a new engine with other initial weights."""
    isolated: bool = False
    """The data isolates documents."""
    freeze: tuple[str, ...] = ()
    """Patterns of the parameters that do not train."""
    adapter: dict[str, Any] | None = None
    """The recipe's `adapter`."""
    balance: dict[str, Any] | None = None
    """The recipe's `model.balance`."""
    groups: tuple[dict[str, Any], ...] = ()
    """The recipe's `optimizer.groups`."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Further settings of the recipe's `optimizer`."""
    kernels: dict[str, str] = field(default_factory=dict)
    """The recipe's `kernels`; nothing is compiled or fused unless they say so."""
    gpu: str = "cpu"
    """For which it is planned."""
    bucket: int | None = None
    """Gradients that megatron-core reduces at once, instead of its 40 million."""

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.get("learning_rate", 1e-3))

    @property
    def name(self) -> str:
        parts = [self.engine, f"zero{self.stage}", self.offload, str(self.recompute)]
        for settings in (self.parallel, self.zero, self.family, self.optimizer, self.kernels):
            parts += [f"{key} {value}" for key, value in settings.items()]
        parts += [f"without {pattern}" for pattern in self.freeze]
        parts += [f"lora {self.adapter['targets']}"] if self.adapter else []
        parts += [f"{len(self.groups)} groups"] if self.groups else []
        parts += [f"balance {self.balance['kind']}"] if self.balance else []
        resumed = ["resumed"] if self.resume_in else []
        resumed += ["in buckets"] * (self.bucket is not None)
        return "-".join([*parts, self.precision, f"micro{self.micro_batch}", *resumed])


def config_of(case: Case) -> dict[str, Any]:
    """The model's config: small, with the case's own keys, or all of these."""
    whole = "vocab_size" in case.family
    return case.family if whole else CONFIG | (WIDE if case.wide else {}) | case.family


def recipe(case: Case, world: int) -> Recipe:
    """The same recipe for every case but for the layout."""
    return Recipe.model_validate(
        {
            "name": "parity",
            "model": {
                "config": config_of(case),
                "freeze": case.freeze,
                "balance": case.balance,
            },
            "adapter": case.adapter,
            "data": {
                "train": {"kind": "text", "files": ["unused"]},
                "isolate_documents": case.isolated,
            },
            "training": {
                "steps": case.steps,
                "sequence_length": LENGTH,
                "global_batch_size": GLOBAL_BATCH,
                "micro_batch_size": case.micro_batch,
                "precision": case.precision,
            },
            "optimizer": {
                "learning_rate": case.learning_rate,
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
                    "nvme_path": case.nvme_path,
                    **case.zero,
                },
            },
            "kernels": {"compile": "none", "fused": "none", **case.kernels},
            "cluster": {"gpus_per_node": world, "gpu": case.gpu},
        }
    )


def global_batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches with very uneven masks: row 0 keeps every label, the last row none."""
    generator = torch.Generator().manual_seed(5)
    keep = torch.linspace(1, 0, GLOBAL_BATCH)[:, None]
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        masked = torch.rand(labels.shape, generator=generator) >= keep
        labels[masked] = IGNORE_INDEX
        yield tokens[:, :-1], labels


def plain_model(case: Case, seed: int = SEED) -> PreTrainedModel:
    """transformers' model with the weights that every engine starts with."""
    wanted = recipe(case, world=1)
    config = hf.build_config(wanted.model)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(wanted.model, config, seed))
    return model


def reference_model(
    case: Case, frozen: Callable[[str], bool] = lambda _: False
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """transformers' model and torch's AdamW, by themselves.

    `frozen` says of a parameter's name that it does not train.
    """
    model = plain_model(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    return model, adamw(model)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's, with weight decay of matrices alone."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = [p for name, p in trained.items() if p.ndim == 1 or name.endswith("bias")]
    matrices = [p for name, p in trained.items() if p.ndim > 1 and not name.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip


def clipped(model: torch.nn.Module) -> float:
    """The gradient norm; afterwards it is at most 1."""
    trained = [p for p in model.parameters() if p.grad is not None]
    gradient = torch.cat([p.grad.flatten() for p in trained])
    norm = gradient.double().norm().item()
    torch.nn.utils.clip_grads_with_norm_(trained, 1.0, torch.tensor(norm))
    return norm


def reference(
    *,
    wide: bool = False,
    family: dict[str, Any] | None = None,
    frozen: Callable[[str], bool] = lambda _: False,
) -> dict[str, list[float]]:
    """A plain single-process transformers loop over whole global batches."""
    case = Case("ddp", GLOBAL_BATCH, wide=wide, family=family or {})
    return plain_loop(*reference_model(case, frozen))


def plain_loop(
    model: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> dict[str, list[float]]:
    """Loss and gradient norm of each step of a loop over whole global batches."""
    losses, norms = [], []
    for inputs, labels in global_batches(steps):
        logits = model(inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clipped(model))
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms}


def micro_batches(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    ranks: Ranks,
    layout: Layout,
) -> list[MicroBatch]:
    """This rank's share of a global batch, in micro batches."""
    share = GLOBAL_BATCH // layout.dp
    first = layout.data_rank(ranks.rank) * share
    mine, size = slice(first, first + share), layout.micro_batch
    parts = zip(inputs[mine].split(size), labels[mine].split(size), strict=True)
    return [MicroBatch(*part) for part in parts]


def first_batch(ranks: Ranks, layout: Layout) -> tuple[list[MicroBatch], int]:
    """This rank's micro batches of the first global batch, and the tokens that count in all."""
    inputs, labels = next(global_batches(1))
    return micro_batches(inputs, labels, ranks, layout), unmasked(labels)


def unmasked(labels: torch.Tensor) -> int:
    """Tokens of a global batch whose loss counts."""
    return int((labels != IGNORE_INDEX).sum())


def new_engine(
    case: Case, ranks: Ranks, seed: int, saved: SavedState | None = None
) -> tuple[Engine, Layout]:
    """The engine of a case, built as the worker builds it: to start, or to continue."""
    wanted = recipe(case, ranks.world)
    config = hf.build_config(wanted.model)
    lora = lora_of(wanted.adapter, config.to_dict())
    shapes = hf.parameter_shapes(config) if lora is None else lora.shapes
    weights: WeightSource = hf.weight_source(wanted.model, config, seed)
    if saved is not None:
        weights = SavedWeights(saved, shapes)
    if lora is not None:
        base = hf.weight_source(wanted.model, config, SEED)
        first = NoZeros(lora, seed) if saved is None else weights
        weights = AdaptedWeights(base, first)
    return build(wanted, ranks, weights, case.bucket)


class NoZeros(LoraWeights):
    """First values with which both factors matter from the first step on."""

    def _whole(self, name: str) -> torch.Tensor:
        return first_value(name, self.shapes[name])


def first_value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) / 20


def build(
    wanted: Recipe, ranks: Ranks, weights: WeightSource, bucket: int | None = None
) -> tuple[Engine, Layout]:
    """The engine of a recipe, as the worker builds it."""
    plan = plan_recipe(wanted)
    config = hf.build_config(wanted.model)
    rendered = BACKENDS[plan.engine].render(wanted, plan.layout)
    if bucket is not None:
        rendered["ddp"]["bucket_size"] = bucket
    setup = EngineSetup.of(wanted, plan, rendered, ranks, config, weights)
    return build_engine(plan.engine, setup), plan.layout


def steps(
    engine: Engine, layout: Layout, ranks: Ranks, first: int, last: int, rate: float = 1e-3
) -> list[StepResult]:
    """Train steps [first, last)."""
    results = []
    for step, (inputs, labels) in enumerate(global_batches(last)):
        if step >= first:
            torch.manual_seed(step)  # as the training loop does, for dropout
            batches = micro_batches(inputs, labels, ranks, layout)
            results.append(engine.train_step(batches, unmasked(labels), rate))
    return results


def curves(results: Sequence[StepResult]) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
    }


def train(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train one case; loss and gradient norm per step, and a validation loss."""
    engine, layout = new_engine(case, ranks, SEED)
    half = case.steps // 2
    results = steps(engine, layout, ranks, 0, half, case.learning_rate)
    if case.resume_in is not None:
        folder = Path(case.resume_in) / case.name
        folder.mkdir(parents=True, exist_ok=True)
        engine, layout = save_and_load(case, ranks, engine, folder)
    results += steps(engine, layout, ranks, half, case.steps, case.learning_rate)
    assert engine.counters().optimizer_steps == case.steps
    inputs, labels = next(global_batches(1))
    validation = engine.evaluate(micro_batches(inputs, labels, ranks, layout))
    assert validation.tokens == int((labels != IGNORE_INDEX).sum()), "counted by every rank"
    biases = biases_of(engine) if case.balance else {}
    engine.close()
    return {
        "biases": biases,
        **curves(results),
        "validation": validation.loss,
        "metrics": [dict(result.metrics) for result in results],
    }


def fall_of_one_batch(case: Case, ranks: Ranks) -> float:
    """How far the loss of one global batch falls in the first step."""
    engine, layout = new_engine(case, ranks, SEED)
    batch = first_batch(ranks, layout)
    first, second = (engine.train_step(*batch, case.learning_rate).loss for _ in range(2))
    engine.close()
    return first - second


def biases_of(engine: Engine) -> dict[str, list[float]]:
    """The correction biases of all ranks, which are equal where several hold one."""
    mine = {
        shard.blocks[0].tensor: shard.get("weight").tolist()
        for shard in engine.state()
        if shard.blocks and is_correction_bias(shard.blocks[0].tensor)
    }
    everyone: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found: dict[str, list[float]] = {}
    for one in everyone:
        assert all(found.get(name, values) == values for name, values in one.items())
        found |= one
    return found


def base_of(wanted: Recipe) -> str | None:
    """What a manifest says of the weights beside adapters."""
    if wanted.adapter is None:
        return None
    return fingerprint(hf.weight_source(wanted.model, hf.build_config(wanted.model), SEED))


def write_state(case: Case, ranks: Ranks, engine: Engine, step: int, folder: Path) -> Path:
    """A checkpoint of the engine's state in `folder`; its path, on every rank."""
    wanted = recipe(case, ranks.world)
    plan = plan_recipe(wanted)
    counters = engine.counters()
    manifest = Manifest(
        step=step, consumed_samples=step * GLOBAL_BATCH, data_fingerprint="", versions={},
        optimizer_steps=counters.optimizer_steps, loss_scale=counters.loss_scale,
        engine=plan.engine, model=plan.model, layout=plan.layout, recent_losses=(),
        recipe=wanted.model_dump(mode="json"), base=base_of(wanted),
    )  # fmt: skip
    companions = {}
    if ranks.rank == 0:
        with TemporaryDirectory() as made:
            config = hf.build_config(wanted.model)
            dtype = DTYPES.get(case.precision, torch.float32)
            hf.save_companions(config, dtype, Path(made))
            files = Path(made).iterdir()
            companions = {f"{COMPANIONS}/{file.name}": file.read_bytes() for file in files}
    saver = Saver(CheckpointStore(folder, keep=1), asynchronous=True)
    saver.save(manifest, engine.state(), companions)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None and saved.problem is None, saved
    return folder / folder_name(step)


def read_state(case: Case, ranks: Ranks, folder: Path, seed: int) -> tuple[Engine, Layout]:
    """A new engine that continues from a checkpoint."""
    engine, layout = new_engine(case, ranks, seed, SavedState(folder))
    restore(engine, folder)
    return engine, layout


def restore(engine: Engine, folder: Path) -> int:
    """Load a checkpoint into an engine that was built with its weights; its step."""
    saved, manifest = SavedState(folder), Manifest.read(folder)
    for shard in engine.state():
        saved.load(shard)
    engine.set_counters(Counters(manifest.optimizer_steps, manifest.loss_scale))
    return manifest.step


def save_and_load(
    case: Case, ranks: Ranks, engine: Engine, folder: Path
) -> tuple[Engine, Layout]:
    """Save, throw the engine away, continue in a new one."""
    checkpoint = write_state(case, ranks, engine, 1, folder)
    engine.close()
    return read_state(case, ranks, checkpoint, SEED + 1)


@torch.no_grad()
def loss_of(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """The loss of a model, by transformers alone."""
    logits = model(inputs).logits
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
    ).item()


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
