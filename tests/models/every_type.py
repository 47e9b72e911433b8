"""Train the smallest sensible model of every causal language model type of transformers.

    python -m tests.models.every_type [--context] [TYPE …]

Three steps in ddp × 1, ZeRO-3 × 2 and fsdp × 2 against transformers and torch
alone. Without TYPE: all types, and docs/how-it-is-tested.md is written.
With `--context`, instead, in ddp with rows that are spread over two ranks, and types.json.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import processes
from tests.engines.cases import TOLERANCE, Case, reference, run, train
from tests.forked import call_ranks, run_ranks
from tests.models.small import tiny
from toolkit.engines.distributed import Ranks
from toolkit.models.judge import model_types
from toolkit.models.model import check_config
from toolkit.models.types import FILE, TYPES
from toolkit.plan.rules import context

PAGE = Path(__file__).parents[2] / "docs/how-it-is-tested.md"
STEPS = 3
LAYOUTS = {
    "ddp × 1": (Case("ddp", 4, steps=STEPS), 1),
    "ZeRO-3 × 2": (Case("deepspeed", 2, 3, steps=STEPS), 2),
    "fsdp × 2": (Case("fsdp", 2, steps=STEPS), 2),
}


def plain(config: dict[str, Any]) -> dict[str, list[float]]:
    """The plain run, in a process of its own."""
    return reference(Case("ddp", 8, steps=STEPS, family=config))


@dataclass(frozen=True)
class Row:
    """What became of one type."""

    model_type: str
    differences: Mapping[str, float]
    """Largest relative difference of losses and gradient norms, by layout."""
    why: str = ""

    @property
    def agrees(self) -> bool:
        return not self.why and max(self.differences.values()) <= TOLERANCE


Results = Iterator[tuple[str, Mapping[str, list[float]]]]


def in_layouts(config: dict[str, Any]) -> Results:
    """What a model computes in each of `LAYOUTS`."""
    for layout, (case, world) in LAYOUTS.items():
        case = replace(case, family=config)
        yield layout, run([case], world)[case.name]


def on_spread_rows(config: dict[str, Any]) -> Results:
    """What it computes on two ranks of a context group."""
    yield "context 2", call_ranks(spread, 2, config)[0]


def spread(ranks: Ranks, config: dict[str, Any]) -> dict[str, list[float]]:
    """One rank of `on_spread_rows`, of types that `dmt check` would refuse, too."""
    case = Case("ddp", 4, steps=STEPS, family=config, parallel={"context": 2})
    with patch.object(context, "SPLIT_IS_KEPT", (config["model_type"],)):
        return train(case, ranks)


def tried(model_type: str, compute: Callable[..., Results] = in_layouts) -> Row:
    """Train one type, by default in every layout."""
    config = tiny(model_type)
    if problems := check_config(config):
        first = problems[0]
        return Row(model_type, {}, f"{first.key}: {first.found}; allowed: {first.allowed}")
    found = {}
    try:
        expected = run_ranks(plain, 1, config)[0]
        for layout, result in compute(config):
            found[layout] = max(
                abs(got - want) / abs(want)
                for what in ("loss", "grad_norm")
                for got, want in zip(result[what], expected[what], strict=True)
            )
    except AssertionError as error:
        lines = str(error).strip().splitlines()
        reasons = [line for line in lines if re.match(r"\S*Error: ", line)] or lines
        return Row(model_type, found, reasons[-1][:200])
    return Row(model_type, found)


TOWER = "besides its text model"
"""In what `dmt check` says of a config with a tower for images or sound."""


def write_page(rows: list[Row]) -> None:
    """Replace the lists of docs/how-it-is-tested.md."""
    agree = sum(row.agrees for row in rows)
    towers = [f"`{row.model_type}`" for row in rows if TOWER in row.why]
    rest = [f"`{row.model_type}`" for row in rows if not row.agrees and TOWER not in row.why]
    listed = f"{agree} of {len(rows)} types agree: all but these.\n"
    refused = f"Refused, as they are more than a model of text: {', '.join(towers)}.\n"
    others = f"Not equal, or failed: {', '.join(rest)}.\n"
    prose = re.split(r"\n\d+ of \d+ types agree", PAGE.read_text("utf-8"))[0]
    page = f"{prose}\n{listed}\n{refused}\n{others}"
    PAGE.write_text(page, encoding="utf-8")


def write_types(rows: list[Row]) -> None:
    """Write which types agree into types.json."""
    known = {name: dict(of) for name, of in TYPES.items()}
    for row in rows:
        known.setdefault(row.model_type, {}).pop("context", None)
        if row.agrees:
            known[row.model_type] = {"context": True, **known[row.model_type]}
    lines = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    FILE.write_text("{\n" + ",\n".join(filter(lambda x: "{}" not in x, lines)) + "\n}\n")


def main(arguments: list[str]) -> int:
    processes.HANG_S = 120.0
    compute = on_spread_rows if "--context" in arguments else in_layouts
    types = [argument for argument in arguments if argument != "--context"]
    rows = []
    for model_type in types or sorted(model_types):
        row = tried(model_type, compute)
        rows.append(row)
        numbers = "  ".join(f"{name} {value:.1e}" for name, value in row.differences.items())
        verdict = "same" if row.agrees else "NOT"
        print(f"{verdict:<4} {model_type:<24} {numbers} {row.why}", flush=True)
    print(f"{sum(row.agrees for row in rows)} of {len(rows)} agree")
    if not types:
        (write_page if compute is in_layouts else write_types)(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
