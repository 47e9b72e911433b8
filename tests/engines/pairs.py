"""Small recipes in which every layout meets every feature, each with several features at once.

What is legal is asked of the product's own rules. The features of a case are chosen greedily:
each new case has as many as it can that its layout has not met.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import torch
from pydantic import ValidationError
from torch import _TorchCompileInductorWrapper as Inductor

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.engines import owners
from toolkit.engines.base import StepResult
from toolkit.engines.distributed import Ranks
from toolkit.errors import PlanError, RecipeError
from toolkit.intake.checks import broken_rules
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.batches import global_batches
from toolkit.rehearse.comparison import Bounds, Comparison, Record, compare, tolerance
from toolkit.rehearse.layouts import STANDARD
from toolkit.rehearse.reference import plain_run
from toolkit.rehearse.worker import small_run
from toolkit.run.assignment import decide
from toolkit.train.shared import with_shares

Settings = dict[str, Any]

LAYOUTS: dict[str, tuple[int, Settings]] = {
    one.name: (one.processes, one.parallel.model_dump(mode="json")) for one in STANDARD
} | {
    "zero2-offload": (
        2, {"engine": "deepspeed", "zero": {"stage": 2, "offload_optimizer": "cpu"}},
    ),
    "fsdp3-offload": (2, {
        "engine": "fsdp",
        "zero": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    }),
    "megatron-dp2": (2, {"engine": "megatron", "zero": {"stage": 0}}),
    "megatron-cp2-ep2": (2, {"engine": "megatron", "context": 2, "expert": 2}),
    "megatron-ep2-distopt": (2, {"engine": "megatron", "expert": 2, "zero": {"stage": 1}}),
    "megatron-tp2-ep2": (4, {"engine": "megatron", "tensor": 2, "expert": 2}),
    "megatron-pp2-distopt": (4, {"engine": "megatron", "pipeline": 2, "zero": {"stage": 1}}),
    "megatron-pp2-cp2-distopt": (
        4, {"engine": "megatron", "pipeline": 2, "context": 2, "zero": {"stage": 1}},
    ),
    "megatron-tp2-cp2-zero3": (4, {
        "engine": "deepspeed", "model": "megatron", "tensor": 2, "context": 2,
        "zero": {"stage": 3},
    }),
    "megatron-dp4-ep2-distopt": (4, {"engine": "megatron", "expert": 2, "zero": {"stage": 1}}),
    "megatron-tp4": (4, {"engine": "megatron", "tensor": 4}),
    "megatron-tp2-zero0-dp1": (
        2, {"engine": "deepspeed", "model": "megatron", "tensor": 2, "zero": {"stage": 0}},
    ),
    "megatron-tp2-zero0": (
        4, {"engine": "deepspeed", "model": "megatron", "tensor": 2, "zero": {"stage": 0}},
    ),
    "fsdp3-replicated": (4, {"engine": "fsdp", "replicate": 2, "zero": {"stage": 3}}),
}  # fmt: skip
"""By name, the number of processes and `parallel`."""

FUSED = (
    "torch.nn.functional.scaled_dot_product_attention",
    "toolkit.models.megatron.attention.scaled_dot_product_attention",
)

DENSE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 101,
    "tie_word_embeddings": True,
}  # fmt: skip
"""No degree divides the vocabulary; tensor 4 exceeds the key/value heads."""
UNTIED = DENSE | {"tie_word_embeddings": False}
MIXTRAL = UNTIED | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
GLM = UNTIED | {
    "model_type": "glm4_moe", "n_routed_experts": 8, "head_dim": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 128,
    "n_positions": 32, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip
BOTTOM = ("model.embed_tokens.*", "model.layers.[01].*")
"""All of the first of two pipeline stages."""
TOP = ("model.layers.[23].*", "model.norm.weight", "lm_head.weight")
"""All of the last of two; the head is not the embedding."""
GROUPS = (
    {"parameters": ("model.embed_tokens.*",), "lr_mult": 0.25, "wd_mult": 0.0},
    {"parameters": ("model.layers.0.*", "*.1.mlp.*"), "lr_mult": 0.5},
    {"parameters": ("model.layers.[0-2].*",), "lr_mult": 1.5, "wd_mult": 40.0},
    {"parameters": ("*norm.weight",), "lr_mult": 2.0, "wd_mult": 5.0},
)
"""Some that overlap, one for all that has no weight decay, and parameters in none."""
GROUP_OF_B = {"parameters": ("*.lora_B.weight",), "lr_mult": 4.0}
"""LoRA+ (arXiv:2402.12354): another learning rate for B than for A."""


def _model(config: Settings) -> Settings:
    return {"model": {"config": config}}


def _optimizer(name: str, rate: float) -> Settings:
    return {"optimizer": {"name": name, "learning_rate": rate}}


def _lora(**changes: Any) -> Settings:
    return {"adapter": {"rank": 3, "alpha": 5, **changes}}


def _objective(name: str, kind: str, **settings: Any) -> Settings:
    train = {"kind": kind, "path": "unused.jsonl"}
    chosen = {"training": {"objective": name}, "data": {"train": train, "packing": "none"}}
    return chosen | ({name: settings} if settings else {})


def _kernels(**kernels: str) -> Settings:
    return {"kernels": kernels}


FEATURES: dict[str, dict[str, Settings]] = {
    "model": {
        "dense": {},
        "untied": _model(UNTIED),
        "mixtral": _model(MIXTRAL),
        "glm": _model(GLM),
        "gpt2": _model(GPT2),
        "six layers": _model(DENSE | {"num_hidden_layers": 6}),
    },
    "optimizer": {
        "adamw": {},
        "muon": _optimizer("muon", 7e-5),
        "adamw_8bit": _optimizer("adamw_8bit", 1e-4),
    },
    "adapter": {
        "none": {},
        "all": _lora(targets="all-linear") | {"optimizer": {"groups": [GROUP_OF_B]}},
        "some": _lora(targets=["v_proj", "up_proj"]),
        "experts": _lora(targets="experts", rank=8),
    },
    "frozen": {
        "none": {},
        "attention": {
            "model": {"freeze": ["*.self_attn.*", "*.post_attention_layernorm.weight"]}
        },
        "bottom": {"model": {"freeze": [*BOTTOM]}},
        "top": {"model": {"freeze": [*TOP]}},
    },
    "groups": {
        "none": {},
        "groups": {"optimizer": {"groups": [*GROUPS]}},
    },
    "documents": {"joined": {}, "apart": {"data": {"isolate_documents": True}}},
    "objective": {
        "pretrain": {},
        "sft": _objective("sft", "chat"),
        "dpo": _objective("dpo", "preference", beta=0.3, sft_weight=0.5),
        "orpo": _objective("orpo", "preference", beta=0.5),
    },
    "labels": {"all": {}, "masked": {}},
    "loss": {"whole": _kernels(loss="whole"), "chunked": _kernels(loss="chunked")},
    "compile": {"none": {}, "layers": _kernels(compile="layers")},
    "fused": {"none": {}, "megatron": _kernels(fused="megatron")},
    "experts": {"apart": {}, "grouped": _kernels(experts="grouped")},
    "attention": {"auto": {}, "eager": _kernels(attention="eager")},
    "exchange": {"auto": {}, "ulysses": _kernels(context="ulysses")},
    "balance": {
        "none": {},
        "loss": {
            "model": {"balance": {"kind": "sequence_loss", "coefficient": 0.05, "z_loss": 0.02}}
        },
        "bias": {
            "model": {"balance": {"kind": "bias", "coefficient": 0.05, "bias_update": 0.02}}
        },
    },
    "recompute": {
        "none": {},
        "full": {"parallel": {"recompute": "full"}},
        "selective": {"parallel": {"recompute": "selective"}},
        "one layer": {"parallel": {"recompute": 1}},
    },
    "stages": {
        "even": {},
        "uneven": {"parallel": {"stages": [3, 1]}},
        "uneven chunks": {"parallel": {"stages": [1, 1, 3, 1]}},
    },
    "micro batch": {
        "2": {},
        "1": {"training": {"micro_batch_size": 1}},
        "4": {"training": {"micro_batch_size": 4}},
        "uneven": {},
    },
}
"""By axis, the values and what each adds to the recipe. The first is that of `BASE`."""
STEPS = 5
BASE: Settings = {
    "name": "pairs",
    "model": {"config": DENSE},
    "data": {"train": {"kind": "text", "files": ["unused"]}, "isolate_documents": False},
    "training": {
        "steps": STEPS, "sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2,
        "precision": "fp32",
    },
    # An eps above what rounding makes of a gradient that is 0, or AdamW makes a step of it; a
    # decay and a limit of the norm that show.
    "optimizer": {
        "learning_rate": 2e-3, "eps": 1e-6, "weight_decay": 0.5, "clip_grad_norm": 0.5,
    },
    "schedule": {"name": "constant"},
}  # fmt: skip
IN_16_BITS = Bounds(3e-2, 3e-2)
Value = tuple[str, str]
"""An axis and one of its values."""
SIX_LAYERS: Value = ("model", "six layers")
"""For chunks that differ."""
FIRST = {axis: next(iter(values)) for axis, values in FEATURES.items()}
VALUES: tuple[Value, ...] = (
    *(
        (axis, value)
        for axis in FEATURES
        for value in FEATURES[axis]
        if value != FIRST[axis] and (axis, value) != SIX_LAYERS
    ),
    *FIRST.items(),  # last: cases for the others have these, too
)


@dataclass(frozen=True)
class Case:
    """A layout with some features; axes that are not named have their first value."""

    layout: str
    features: tuple[Value, ...] = ()
    precision: str = "fp32"

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def values(self) -> set[Value]:
        """Of all axes."""
        return set((FIRST | dict(self.features)).items())

    @property
    def masked(self) -> bool:
        return ("labels", "masked") in self.features

    @property
    def moved(self) -> bool:
        """Whether samples moved from every second data-parallel rank to the one before."""
        return ("micro batch", "uneven") in self.features

    def __str__(self) -> str:
        return f"{self.layout}: {', '.join(map(' '.join, self.features))}"


@cache
def recipe_of(case: Case) -> Recipe | None:
    """None where the product refuses it."""
    world, parallel = LAYOUTS[case.layout]
    plain = BASE | {"parallel": parallel, "cluster": {"gpus_per_node": world, "gpu": "cpu"}}
    plain["training"] = {**plain["training"], "precision": case.precision}
    for axis, value in case.features:
        added = FEATURES[axis][value]
        if axis == "model" and value != "dense":
            plain = plain | {"model": added["model"]}
            continue
        for section, settings in added.items():
            plain = plain | {section: {**plain.get(section, {}), **settings}}
    if case.masked and {("objective", "pretrain"), ("documents", "joined")} - case.values:
        return None  # neither has positions that restart anywhere
    try:
        recipe = Recipe.model_validate(plain)
        if [*broken_rules(recipe)]:
            return None
        layout = decide(recipe, None).plan.layout
        if case.moved and (layout.dp % 2 or recipe.model.balance is not None):
            return None
    except (ValidationError, PlanError, RecipeError):
        return None
    return recipe


def _with(case: Case, value: Value) -> Case | None:
    """The case with another value of one axis, if that is legal."""
    features = dict(case.features) | dict([value])
    ordered = tuple((axis, features[axis]) for axis in FEATURES if axis in features)
    more = Case(case.layout, ordered)
    return more if recipe_of(more) is not None else None


def _models(layout: str) -> list[Case]:
    """The layout with each model that it can train."""
    cases = [Case(layout, (("model", model),)) for model in FEATURES["model"]]
    return [case for case in cases if recipe_of(case) is not None]


def covering(layouts: Sequence[str]) -> Iterator[Case]:
    """Cases in which each value that one of the layouts can have appears at least once."""
    starts = {layout: _models(layout) for layout in layouts}
    missing = dict.fromkeys(
        value
        for value in VALUES
        if any(_with(start, value) for cases in starts.values() for start in cases)
    )
    for number, layout in enumerate(cycle(layouts)):
        if not missing:
            return
        first = next(iter(missing))
        case = next(filter(None, (_with(start, first) for start in starts[layout])), None)
        if case is None:
            if number % len(layouts) == 0:  # another layout has it
                missing[first] = missing.pop(first)
            continue
        for value in list(missing):
            axis = value[0]
            if axis in dict(case.features) and (axis != "model" or first[0] == "model"):
                continue
            case = _with(case, value) or case
        for value in case.values:
            missing.pop(value, None)
        yield case


def covering_array(layouts: Sequence[str], most: int | None = None) -> list[Case]:
    """`covering`, or its first cases, and one case for each layout that has none there."""
    cases = [*covering(layouts)][:most]
    left = [name for name in layouts if name not in {case.layout for case in cases}]
    return cases + [_models(name)[0] for name in left]


def in_16_bits(layout: str) -> Iterator[Case]:
    """Each optimizer, in bf16 and fp16."""
    for precision, optimizer in product(("bf16", "fp16"), FEATURES["optimizer"]):
        case = Case(layout, (("optimizer", optimizer),), precision)
        if recipe_of(case) is not None:
            yield case


def masked(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """With a quarter of the labels masked, unevenly, and positions that restart in each row."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for batch in batches:
        rows, length = batch.labels.shape
        share = torch.linspace(0.5, 0.0, length)
        drawn = torch.rand(batch.labels.shape, generator=generator)
        labels = torch.where(drawn < share, IGNORE_INDEX, batch.labels)
        restart = torch.randint(1, length, (rows, 1), generator=generator)
        here = torch.arange(length)
        positions = torch.where(here < restart, here, here - restart)
        found.append(MicroBatch(batch.input_ids, labels, positions=positions))
    return found


def batches_of(case: Case, recipe: Recipe) -> list[MicroBatch] | None:
    if not case.masked:
        return None
    assert recipe.model.config is not None
    return masked(global_batches(recipe, recipe.model.config["vocab_size"]))


def graph_of_kernels(_: Inductor, module: Any, inputs: Any) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


def fused_attention(*_: object, **__: object) -> None:
    raise AssertionError("a fused kernel was asked for")


@contextmanager
def kernels_of(case: Case) -> Iterator[None]:
    """Graphs are run by torch's own kernels: inductor, which test_parity.py has, takes ten
    times as long to make some. Eager attention asks for no fused kernel, and Muon's matrices
    are exchanged a few at a time."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(owners, "EXCHANGED_AT_ONCE", 20_000))
        patches.enter_context(patch.object(Inductor, "__call__", graph_of_kernels))
        if ("attention", "eager") in case.features:
            for place in FUSED:
                patches.enter_context(patch(place, fused_attention))
        yield


def record(case: Case, ranks: Ranks) -> Record:
    """What a rank does for a case."""
    recipe = recipe_of(case)
    assert recipe is not None
    decided = decide(recipe, None)
    layout = decided.plan.layout
    split = with_shares(layout, (3, 1) * (layout.dp // 2)) if case.moved else layout
    with kernels_of(case):
        return recorded(small_run(decided, ranks, batches_of(case, recipe), split))


def recorded(results: Iterable[StepResult]) -> Record:
    losses, norms = zip(*((one.loss, one.grad_norm) for one in results), strict=True)
    return Record(losses, norms)


def records(ranks: Ranks, cases: Sequence[Case]) -> list[Record]:
    return [record(case, ranks) for case in cases]


def reference(case: Case) -> Record:
    """transformers, PEFT and torch alone, in this process."""
    ours = {"layout", "loss", "compile", "fused", "experts", "attention", "exchange"}
    ours |= {"recompute", "micro batch", "stages"}
    kept = tuple(one for one in case.features if one[0] not in ours)
    return _reference(Case("ddp", kept))


@cache
def _reference(case: Case) -> Record:
    recipe = recipe_of(case)
    assert recipe is not None
    losses, norms = zip(*plain_run(recipe, batches_of(case, recipe)), strict=True)
    return Record(losses, norms)


def compared(case: Case, found: Record) -> Comparison:
    """With the reference, which is in fp32."""
    recipe = recipe_of(case)
    assert recipe is not None
    layout = decide(recipe, None).plan.layout
    bounds = tolerance(layout) if case.precision == "fp32" else IN_16_BITS
    return compare(found, reference(case), bounds)
