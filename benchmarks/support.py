"""`docs/support.md`: what trains where, by the rules that `dmt check` and the planner use.

    PYTHONPATH=. python benchmarks/support.py [--write PAGE | --check PAGE]

A cell is one recipe: its first refusal is the reason. Whether a test has trained it is asked of
the cases of `tests/engines/pairs.py`, which `tests/engines/test_pairs.py` compares with plain
transformers on CPUs, and of the self-test's steps.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tests.engines.pairs import BASE, FEATURES, LAYOUTS, Case, Value, covering, recipe_of
from tests.engines.test_pairs import FOUR, SHARED, TWO
from toolkit.backend import BACKENDS
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.extras.doctor.selftest.plan import losses
from toolkit.intake.checks import broken_rules
from toolkit.intake.load import load_recipe
from toolkit.layout import Pair
from toolkit.objectives import OBJECTIVES
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.plan.rules.legality import table
from toolkit.recipe.places import RECIPES
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import TARGETS

Settings = dict[str, Any]
PAIRS: tuple[Pair, ...] = tuple(sorted(table(), key=lambda one: (one.model, one.engine)))
CLUSTER: Settings = {"gpus_per_node": 4, "gpu": "h100-80gb"}
UNTRIED = "rendered"
"""In a cell: the rules allow it, no test of `pairs.py` has it."""


@dataclass(frozen=True)
class Row:
    """Something that a recipe asks for."""

    title: str
    settings: Settings = field(default_factory=dict)
    values: frozenset[Value] = frozenset()
    """Those of `pairs.FEATURES` that have the same settings."""
    selftest: str = ""
    """The step of `dmt doctor --selftest` that trains it."""
    parallel: Settings = field(default_factory=dict)
    """What it asks of a layout besides."""
    compared: bool = True
    """Whether `values` and `parallel` are all that it asks for."""

    def __add__(self, other: "Row") -> "Row":
        return Row(
            f"{self.title}, {other.title}",
            merged(self.settings, other.settings),
            self.values | other.values,
            parallel=merged(self.parallel, other.parallel),
            compared=self.compared and other.compared,
        )


def uncompared(title: str, settings: Settings, selftest: str = "") -> Row:
    """A row that no case of `pairs.py` has."""
    return Row(title, settings, frozenset(), selftest, compared=False)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Settings:
    """Maps are merged deeply, except a model's config and a source."""
    found = dict(one)
    for key, value in other.items():
        whole = key in ("config", "train") or not isinstance(found.get(key), dict)
        found[key] = value if whole or value is None else merged(found[key], value)
    return found


def of_axis(axis: str, **titles: str) -> list[Row]:
    """A row for each value of an axis of `pairs.FEATURES`, by default titled as there."""
    return [
        Row(titles.get(value.replace(" ", "_"), value), settings, frozenset([(axis, value)]))
        for value, settings in FEATURES[axis].items()
        if titles.get(value.replace(" ", "_"), value)
    ]


def in_parallel(title: str, **settings: Any) -> Row:
    return Row(title, {"parallel": settings}, parallel=settings)


OTHER_MODELS = {
    "opt, which has no family file": {
        "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64,
        "max_position_embeddings": 64,
    },
    "mamba, which has a state along the row": {
        "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 101,
        "state_size": 8,
    },
}  # fmt: skip

MODELS = [
    *of_axis(
        "model",
        dense="llama, grouped queries, tied embeddings",
        untied="llama, untied embeddings",
        mixtral="mixtral: experts, softmax routers",
        glm="glm4_moe: experts, sigmoid routers, shared experts",
        gpt2="gpt2: learned positions, biases",
    ),
    *(
        uncompared(title, {"model": {"config": config}})
        for title, config in OTHER_MODELS.items()
    ),
]
_DISK = {"nvme_path": "/disk", "stage": 3}
LAYOUT_ROWS = [
    in_parallel("data parallel alone", zero={"stage": 0}),
    *(in_parallel(f"ZeRO {stage}", zero={"stage": stage}) for stage in (1, 2, 3)),
    in_parallel("copies of shards (`replicate`)", replicate=2),
    in_parallel("tensor", tensor=2),
    in_parallel("tensor + sequence", tensor=2, sequence=True),
    in_parallel("pipeline", pipeline=2),
    in_parallel("interleaved pipeline", pipeline=2, virtual_pipeline=2),
    *(
        replace(in_parallel("", pipeline=2) + one, title="uneven pipeline (`stages`)")
        for one in of_axis("stages", even="", uneven_chunks="")
    ),
    in_parallel("context", context=2),
    in_parallel("expert", expert=2),
    replace(
        in_parallel("uneven samples (`shares`)", shares=(3, 1)),
        settings={"parallel": {"shares": [3, 1]}, "cluster": {"gpus_per_node": 2}},
    ),
    in_parallel("optimizer on the CPU", zero={"offload_optimizer": "cpu"}),
    in_parallel(
        "parameters on the CPU", zero={"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    ),
    in_parallel("optimizer on NVMe", zero={"offload_optimizer": "nvme", **_DISK}),
    in_parallel(
        "parameters on NVMe",
        zero={"offload_optimizer": "nvme", "offload_parameters": "nvme", **_DISK},
    ),
    *of_axis(
        "recompute",
        none="",
        full="recompute: all of a layer",
        selective="recompute: attention",
        one_layer="recompute: some layers, their inputs on the CPU",
    ),
    in_parallel("without overlap", overlap="none"),
]
OBJECTIVE_ROWS = of_axis("objective")
ADAPTER_ROWS = of_axis(
    "adapter",
    none="",
    all="LoRA on all linear layers",
    some="LoRA on some",
    experts="LoRA on experts",
)
OPTIMIZER_ROWS = of_axis("optimizer", **{"muon,_other": ""})
PARTS_ROWS = [
    *of_axis("frozen", none="", attention="frozen attention", bottom="frozen first stage"),
    *of_axis("groups", none="", groups="groups of parameters"),
]
BALANCE_ROWS = of_axis(
    "balance", none="", loss="balance of experts: loss", bias="balance: bias"
)
PRECISION_ROWS = [
    Row("fp32", {"training": {"precision": "fp32"}}),
    uncompared("bf16", {}, "losses bf16"),
    uncompared("fp16", {"training": {"precision": "fp16"}}),
    uncompared("fp8", {"fp8": {}}, "losses fp8"),
]
_OF_MEGATRON = "megatron-core's fused SwiGLU"
KERNEL_ROWS = [
    *of_axis("loss", whole="", chunked="logits in chunks"),
    *of_axis("compile", none="", layers="torch.compile"),
    *of_axis("fused", none="", megatron=_OF_MEGATRON),
    uncompared("Liger's kernels", {"kernels": {"fused": "liger"}}),
    *of_axis("experts", apart="", grouped="grouped experts"),
    *of_axis("attention", auto="", eager="eager attention"),
    *of_axis("mlp", whole="", tiled="tiled MLP"),
    *of_axis("documents", joined="", apart="isolated documents"),
]
DATA_ROWS = [
    Row("`kind: text`", {"data": {"train": {"kind": "text", "files": ["unused"]}}}),
    Row("`kind: hf`", {"data": {"train": {"kind": "hf", "path": "unused"}}}),
    Row("`kind: megatron`", {"data": {"train": {"kind": "megatron", "prefix": "unused"}}}),
    Row("`kind: chat`", {"data": {"train": {"kind": "chat", "path": "unused"}}}),
    Row("`kind: preference`", {"data": {"train": {"kind": "preference", "path": "unused"}}}),
]
_DATA_OF = {"pretrain": DATA_ROWS[0], "sft": DATA_ROWS[3]}
DATA_FEATURES = [
    Row("`packing: greedy`", {"data": {"packing": "greedy"}}),
    Row("`packing: best_fit`", {"data": {"packing": "best_fit"}}),
    Row("`isolate_documents`", {"data": {"isolate_documents": True}}),
]


def plain(row: Row, pair: Pair | None = None) -> Settings:
    """A recipe that asks for it on a cluster of GPUs, in bf16 unless the row says otherwise."""
    training = {"micro_batch_size": "auto", "precision": "bf16", "sequence_length": 32}
    found = merged(BASE, {"name": "this", "cluster": CLUSTER, "training": training})
    if pair is not None:
        found = merged(found, {"parallel": {"engine": pair.engine, "model": pair.model}})
    return merged(found, row.settings)


def _without(reason: str, pair: Pair | None) -> str:
    for word in ("for", "with") if pair is not None else ():
        reason = reason.replace(f" {word} {pair}", "")
    return reason


def _of(problem: Problem, pair: Pair | None) -> str:
    found = "" if pair is None else f" {problem.found};"
    return _without(f"`{problem.key}`:{found} allowed: {problem.allowed}", pair)


def recipe(row: Row, pair: Pair | None) -> Recipe | str:
    """The recipe, or the first refusal of the schema or of the rules."""
    try:
        made = Recipe.model_validate(plain(row, pair))
    except ValidationError as error:
        wrong = error.errors()[0]
        return f"`{'.'.join(map(str, wrong['loc']))}`: {wrong['msg']}"
    problem = next(broken_rules(made), None)
    return made if problem is None else _of(problem, pair)


_REFUSALS: dict[tuple[str, Pair | None], str] = {}


def refusal(row: Row, pair: Pair | None) -> str:
    """Why no layout of a pair of engine and model trains it; empty if one does."""
    key = (json.dumps(row.settings, sort_keys=True), pair)
    if key not in _REFUSALS:
        _REFUSALS[key] = _refusal(row, pair)
    return _REFUSALS[key]


def _refusal(row: Row, pair: Pair | None) -> str:
    made = recipe(row, pair)
    if isinstance(made, str):
        return made
    try:
        plan = plan_recipe(made, explained=False)
        BACKENDS[plan.engine].render(made, plan.layout)
    except RecipeError as error:
        return _of(error.problems[0], pair)
    except PlanError as error:
        return _without(error.message, pair)
    return ""


def with_model(row: Row) -> Row:
    """The row with the first model that some engine trains so, where it does not name one."""
    if "model" in row.settings and "config" in row.settings["model"]:
        return row
    choices = [row, *(one + row for one in MODELS[1:5])]
    able = (one for one in choices if any(not refusal(one, pair) for pair in PAIRS))
    found = next(able, row)
    return replace(row, settings=found.settings)


@cache
def tested() -> tuple[tuple[Pair, Case, Settings], ...]:
    """Every case of `tests/engines/test_pairs.py` that CI runs, with what its layout states."""
    alone = [name for name in TWO if not any(name in names for names in SHARED.values())]
    groups = [*([name] for name in alone), *SHARED.values(), *FOUR.values()]
    found = []
    for case in (case for group in groups for case in covering(group)):
        made = recipe_of(case)
        assert made is not None
        plan = plan_recipe(made, explained=False)
        found.append((Pair(plan.engine, plan.model), case, made.parallel.model_dump()))
    return tuple(found)


def holds(stated: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether settings of `parallel` are among the `stated` ones."""
    return all(
        holds(stated[key], value) if isinstance(value, dict) else stated[key] == value
        for key, value in asked.items()
    )


def evidence(row: Row, pair: Pair | None) -> str:
    """The layout of `pairs.LAYOUTS`, or the step of the self-test, that trains it on CPUs."""
    if row.selftest:
        compared = next(one for one in losses(2) if one.title == row.selftest)
        has = any(pair == (one.parallel.engine, one.parallel.model) for one in compared.layouts)
        return f"selftest, {row.selftest}" if has else ""
    if not row.compared:
        return ""
    for of, case, stated in tested():
        if pair in (None, of) and row.values <= case.values and holds(stated, row.parallel):
            return case.layout
    return ""


def in_soak(row: Row) -> str:
    """A layout in which `make soak` trains an optimizer with another value."""
    known = row.compared and not row.parallel
    if not known or len(row.values) != 2 or "optimizer" not in dict(row.values):
        return ""
    values = sorted(row.values)
    cases = (Case(name, tuple(values)) for name, (world, _) in LAYOUTS.items() if world == 2)
    return next((case.layout for case in cases if recipe_of(case) is not None), "")


class Notes:
    """Footnotes of a table."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, reason: str) -> str:
        reason = " ".join(reason.split()).replace("|", "\\|")
        return f"– [{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> Iterator[str]:
        if self.numbers:
            yield ""
        for reason, number in self.numbers.items():
            yield f"{number}. {reason}"


Cells = Callable[[Row, Any, Notes], str]


def cell(row: Row, pair: Pair | None, notes: Notes, *, tests: bool) -> str:
    if why := refusal(row, pair):
        return notes(why)
    layout = evidence(row, pair) if tests else ""
    return f"✓ `{layout}`" if layout else UNTRIED


def grid(
    head: str, rows: Iterable[Row], columns: Mapping[str, Any], cells: Cells
) -> Iterator[str]:
    """A table with its footnotes."""
    notes = Notes()
    yield f"| {head} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for row in rows:
        found = [cells(row, column, notes) for column in columns.values()]
        yield f"| {row.title} | {' | '.join(found)} |"
    yield from notes.lines()


BY_PAIR: Mapping[str, Any] = {
    f"`{pair.engine}`, {'transformers' if pair.model == 'hf' else 'megatron-core'}": pair
    for pair in PAIRS
}


def on_pairs(head: str, rows: Sequence[Row], *, tests: bool) -> Iterator[str]:
    made = [with_model(row) for row in rows]
    return grid(
        head, made, BY_PAIR, lambda row, pair, notes: cell(row, pair, notes, tests=tests)
    )


def of_data() -> Iterator[str]:
    """Data × objective; no case of `pairs.py` reads files."""
    columns = {f"`{name}`": name for name in OBJECTIVES.names}

    def of(row: Row, name: str, notes: Notes) -> str:
        objective = Row(name, {"training": {"objective": name}, "data": {}})
        data = _DATA_OF.get(name, DATA_ROWS[4])
        why = refusal(objective + data + row, None)
        return notes(why) if why else "yes"

    return grid("`data`", [*DATA_ROWS, *DATA_FEATURES], columns, of)


TOGETHER_ROWS = [
    *OBJECTIVE_ROWS[1:],
    ADAPTER_ROWS[0],
    *PARTS_ROWS[0:3:2],
    KERNEL_ROWS[-1],
    *KERNEL_ROWS[:3],
    *BALANCE_ROWS[:1],
    PRECISION_ROWS[3],
]
TOGETHER_COLUMNS = [
    ADAPTER_ROWS[0],
    *OPTIMIZER_ROWS[1:],
    *(one for one in LAYOUT_ROWS if one.title in (
        "ZeRO 3", "tensor", "pipeline", "context", "expert", "optimizer on the CPU",
    )),
]  # fmt: skip


def together(*, tests: bool) -> Iterator[str]:
    """Features in pairs: on any engine, which may differ from cell to cell."""

    def of(row: Row, column: Row, notes: Notes) -> str:
        if row is column:
            return ""
        both = with_model(row + column)
        able = (pair for pair in PAIRS if not refusal(both, pair))
        if (first := next(able, None)) is None:
            return notes(_apart(row, column))
        if not tests:
            return UNTRIED
        layouts = (evidence(both, pair) for pair in (first, *able))
        layout = next(filter(None, layouts), "")
        if not layout and (layout := in_soak(both)):
            layout += ", soak"
        return f"✓ `{layout}`" if layout else UNTRIED

    columns = {one.title: one for one in TOGETHER_COLUMNS}
    return grid("", TOGETHER_ROWS, columns, of)


def _apart(row: Row, column: Row) -> str:
    """Why no pair does both: the rule, where one pair has each, else who has which."""
    others = with_model(column)
    able = [
        [pair for pair in PAIRS if not refusal(one, pair)] for one in (with_model(row), others)
    ]
    if shared := [pair for pair in able[0] if pair in able[1]]:
        return refusal(others + row, shared[0])
    who = [
        " and ".join(
            title.replace(",", " with") for title, one in BY_PAIR.items() if one in pairs
        )
        for pairs in able
    ]
    return f"{row.title} is for {who[0]}; {column.title} for {who[1]}"


WRITTEN = {
    "pretrain": ("llama/llama-3.1-8b", "pythia/pythia-1.4b"),
    "sft": ("llama/llama-3.1-8b",),
    "dpo": ("llama/llama-3.1-8b",),
    "lora": ("llama/llama-3.1-8b",),
}
"""By the ending of a shipped recipe's name, the models of which one is to be expressed."""
DOCUMENTS = (
    "data.validation=null",
    "data.train={kind: megatron, prefix: /data/tokens}",
    "data.train={kind: hf, path: allenai/c4, name: en}",
    "data.packing=best_fit",
)
"""The recipe's own, and what some tools take alone."""
CHATS = (DOCUMENTS[0], "data.train.format=messages")
DATA_OF = {"pretrain": DOCUMENTS, "sft": CHATS, "lora": CHATS, "dpo": DOCUMENTS[:1]}


def rendered() -> Iterator[str]:
    """`dmt render --to` of a plan of each pair, and of what is trained."""
    names = [name for name, one in TARGETS.items() if one.rendered]
    columns: dict[str, tuple[str, Sequence[Pair]]] = {
        title: ("pretrain", [pair]) for title, pair in BY_PAIR.items()
    }
    columns |= {f"`{task}`": (task, PAIRS) for task in ("sft", "dpo", "lora")}

    def of(row: Row, column: tuple[str, Sequence[Pair]], notes: Notes) -> str:
        engine = TARGETS[row.title].engine
        able = [pair for pair in column[1] if engine in ("", pair.engine)]
        if not able:
            return notes(f"only plans of engine {engine}")
        why = [_unwritten(row.title, column[0], pair) for pair in able]
        return "yes" if "" in why else notes(why[0])

    return grid("`--to`", [Row(name) for name in names], columns, of)


def _unwritten(name: str, task: str, pair: Pair) -> str:
    """Why another tool's file expresses no shipped recipe of a task; empty if it does one."""
    target, reasons = TARGETS[name], []
    for model in WRITTEN[task]:
        plan = planned(f"{model}-{task}", pair)
        for data in DATA_OF[task]:
            try:
                target.write(target.adapt(shipped(f"{model}-{task}", pair, data)), plan)
            except RecipeError as error:
                reasons.append(_of(error.problems[0], pair))
            except PlanError as error:
                reasons.append(_without(error.message, pair))
            else:
                return ""
    return min(reasons, key=lambda reason: reason.startswith(("`data", "`model")))


@cache
def planned(name: str, pair: Pair) -> Plan:
    return plan_recipe(shipped(name, pair), explained=False)


def shipped(name: str, pair: Pair, data: str = DOCUMENTS[0]) -> Recipe:
    """A recipe of this repository on two GPUs."""
    changes = [
        "name=this", "cluster.nodes=1", "cluster.gpus_per_node=2", data,
        "evaluation.every_steps=null", "data.validation=null", "training.epochs=null",
        "training.tokens=null", "training.steps=10000", f"parallel.engine={pair.engine}",
        f"parallel.model={pair.model}",
    ]  # fmt: skip
    return load_recipe(RECIPES / f"{name}.yaml", changes)


HEAD = """\
# What is supported

<!-- Generated by `PYTHONPATH=. python benchmarks/support.py --write docs/support.md`. -->

Every cell is a small recipe that was given to the rules of `dmt check` and to the planner, for
4 H100 in bf16. To ask them about your own: `dmt check RECIPE`, `dmt plan RECIPE`.

| cell | meaning |
|---|---|
| ✓ `zero3` | Allowed, and CI trains it in fp32 on CPUs next to plain transformers, for \
example in this layout of `tests/engines/pairs.py`: losses and gradient norms agree to 1e-5 \
(1e-4 with offload). With `soak`, `make soak` does; `selftest, …` is a step of \
`dmt doctor --selftest`. |
| {untried} | Allowed, planned and rendered; no case of that comparison has it. Other tests \
may, and [gpu.md](gpu.md) has what ran on a GPU. |
| – [n] | Refused before anything starts; the reason is the rules' own, below the table. |

The columns are engines and the implementation of the model that they train.
"""


def text(*, tests: bool = True) -> str:
    """The page; without `tests`, no cell names a layout that trained it, which is faster."""
    parts: list[tuple[str, Iterator[str]]] = [
        ("Models", on_pairs("`model`", MODELS, tests=tests)),
        ("Layouts", on_pairs("`parallel`", LAYOUT_ROWS, tests=tests)),
        (
            "Objectives, adapters and optimizers",
            on_pairs(
                "what is trained",
                [
                    *OBJECTIVE_ROWS,
                    *ADAPTER_ROWS,
                    *OPTIMIZER_ROWS,
                    *PARTS_ROWS,
                    *BALANCE_ROWS,
                ],
                tests=tests,
            ),
        ),
        (
            "Precision and kernels",
            on_pairs("how it is computed", [*PRECISION_ROWS, *KERNEL_ROWS], tests=tests),
        ),
        ("Context parallel", on_pairs("exchange", exchanges(), tests=tests)),
        ("Data", of_data()),
        ("Two at once", together(tests=tests)),
        ("Other tools' files", rendered()),
    ]
    lines = [HEAD.format(untried=UNTRIED)]
    for title, rows in parts:
        lines += [f"## {title}", "", *([NOTES[title], ""] if title in NOTES else []), *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def exchanges() -> list[Row]:
    context = in_parallel("", context=2)
    return [replace(context + row, title=row.title) for row in of_axis("exchange")]


NOTES = {
    "Data": "Whatever the engine; `tests/data/` and `tests/e2e/` train what is allowed.",
    "Two at once": "On at least one engine.",
    "Other tools' files": "What `dmt render --to` writes, by engine and by what is trained.",
}


def untested(page: str) -> str:
    """A page without the names of layouts: what `text(tests=False)` makes."""
    return re.sub(r"✓ `[^`…]+` \|", f"{UNTRIED} |", page.partition("## ")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    page = text()
    if options.write:
        options.write.write_text(page, encoding="utf-8")
    elif options.check:
        if options.check.read_text(encoding="utf-8") != page:
            print(f"{options.check} is out of date: python {sys.argv[0]} --write …")
            return 1
    else:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
