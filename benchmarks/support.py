"""`docs/support.md`: what trains where, by the rules that `dmt check` and the planner use.

    PYTHONPATH=. python benchmarks/support.py [--write PAGE]

A cell is one recipe, of which the first refusal is the reason.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tests.engines.pairs import BASE, FEATURES
from toolkit.backend import BACKENDS
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.intake.checks import broken_rules
from toolkit.layout import Pair
from toolkit.objectives import OBJECTIVES
from toolkit.plan.planner import plan_recipe
from toolkit.plan.rules.legality import table
from toolkit.recipe.schema import Recipe

Settings = dict[str, Any]
PAIRS: tuple[Pair, ...] = tuple(sorted(table(), key=lambda one: (one.model, one.engine)))
CLUSTER: Settings = {"gpus_per_node": 4, "gpu": "h100-80gb"}


@dataclass(frozen=True)
class Row:
    """Something that a recipe asks for."""

    title: str
    settings: Settings = field(default_factory=dict)
    axis: str = ""
    """The axis of `pairs.FEATURES` that it is a value of."""

    def __add__(self, other: "Row") -> "Row":
        settings = merged(self.settings, other.settings)
        return Row(f"{self.title}, {other.title}", settings, other.axis)


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
        Row(titles.get(value.replace(" ", "_"), value), settings, axis)
        for value, settings in FEATURES[axis].items()
        if titles.get(value.replace(" ", "_"), value)
    ]


def in_parallel(title: str, **settings: Any) -> Row:
    return Row(title, {"parallel": settings})


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
    *(Row(title, {"model": {"config": config}}) for title, config in OTHER_MODELS.items()),
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
        one_layer="recompute: some layers",
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
    Row("bf16", {}),
    Row("fp16", {"training": {"precision": "fp16"}}),
    Row("fp8", {"kernels": {"fp8": "rowwise"}}),
]
_OF_MEGATRON = "megatron-core's fused SwiGLU"
KERNEL_ROWS = [
    *of_axis("loss", whole="", chunked="logits in chunks"),
    *of_axis("compile", none="", layers="torch.compile"),
    *of_axis("fused", none="", megatron=_OF_MEGATRON),
    Row("Liger's kernels", {"kernels": {"fused": "liger"}}),
    *of_axis("experts", apart="", grouped="grouped experts"),
    *of_axis("attention", auto="", eager="eager attention"),
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


def cell(row: Row, pair: Pair | None, notes: Notes) -> str:
    why = refusal(row, pair)
    return notes(why) if why else "yes"


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


def on_pairs(head: str, rows: Sequence[Row]) -> Iterator[str]:
    made = [with_model(row) for row in rows]
    return grid(head, made, BY_PAIR, cell)


def of_data() -> Iterator[str]:
    """Data × objective."""
    columns = {f"`{name}`": name for name in OBJECTIVES.names}

    def of(row: Row, name: str, notes: Notes) -> str:
        objective = Row(name, {"training": {"objective": name}, "data": {}})
        data = _DATA_OF.get(name, DATA_ROWS[4])
        why = refusal(objective + data + row, None)
        return notes(why) if why else "yes"

    return grid("`data`", [*DATA_ROWS, *DATA_FEATURES], columns, of)


HEAD = """\
# What is supported

<!-- Generated by `PYTHONPATH=. python benchmarks/support.py --write docs/support.md`. -->

Every cell is a small recipe that was given to the rules of `dmt check` and to the planner, for
4 H100 in bf16. To ask them about your own: `dmt check RECIPE`, `dmt plan RECIPE`.

| cell | meaning |
|---|---|
| yes | Allowed, planned and rendered. `tests/engines/pairs.py` names the layouts and features \
that CI trains in fp32 on CPUs next to plain transformers, losses and norms within 1e-5 \
(1e-4 with offload); [gpu.md](gpu.md) has what ran on a GPU. |
| – [n] | Refused before anything starts; the reason is the rules' own, below the table. |

The columns are engines and the implementation of the model that they train.
"""


def text() -> str:
    """The page."""
    trained = [*OBJECTIVE_ROWS, *ADAPTER_ROWS, *OPTIMIZER_ROWS, *PARTS_ROWS, *BALANCE_ROWS]
    computed = [*PRECISION_ROWS, *KERNEL_ROWS]
    parts: list[tuple[str, Iterator[str]]] = [
        ("Models", on_pairs("`model`", MODELS)),
        ("Layouts", on_pairs("`parallel`", LAYOUT_ROWS)),
        ("Objectives, adapters and optimizers", on_pairs("what is trained", trained)),
        ("Precision and kernels", on_pairs("how it is computed", computed)),
        ("Context parallel", on_pairs("exchange", exchanges())),
        ("Data, whatever the engine", of_data()),
    ]
    lines = [HEAD]
    for title, rows in parts:
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def exchanges() -> list[Row]:
    context = in_parallel("", context=2)
    return [replace(context + row, title=row.title) for row in of_axis("exchange")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.write:
        options.write.write_text(text(), encoding="utf-8")
    else:
        print(text())


if __name__ == "__main__":
    main()
