"""Dimensions of a layout: its degrees and switches, a row each.

A new one is a field of `Layout`, a setting of the recipe's schema, its row here, its memory and
time in `plan/cost/`, and what an engine's `Support` says of it. Planner, checks, explanations,
tables, `dmt init` and rehearsals read the rows. The data-parallel degree and the accumulation
have none: they follow from the others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.layout import Layout


class Dimension(NamedTuple):
    """One degree or switch of a layout."""

    field: str
    """Field of `Layout`, whose default is the value of a layout without it."""
    key: str
    """The recipe's setting, dotted."""
    name: str
    """Its name in reasons."""
    word: str = ""
    """The format of a value in a layout's text: `tp2`. Kernels and recompute: in its long
    text."""
    degree: bool = False
    """Whether it multiplies the ranks or the parts of a model. A value of 1 is none."""

    @property
    def setting(self) -> str:
        """The last part of the key: `tensor`."""
        return self.key.rpartition(".")[2]

    def of(self, recipe: Any) -> Any:
        """The value that a recipe, or a request of one, states."""
        return attrgetter(self.key)(recipe)

    def used(self, layout: Layout) -> bool:
        """Whether a layout has another value than the default."""
        return bool(getattr(layout, self.field) != getattr(_PLAIN, self.field))

    def text(self, value: Any) -> str:
        """A value in a layout's text."""
        if isinstance(value, tuple):
            value = division_text(value).replace(" + ", "+").replace(" × ", "×")
        return self.word.format(value)


_PLAIN = Layout()

DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("tp", "parallel.tensor", "tensor", "tp{}", degree=True),
    Dimension("pp", "parallel.pipeline", "pipeline", "pp{}", degree=True),
    Dimension("vpp", "parallel.virtual_pipeline", "virtual pipeline", "vpp{}", degree=True),
    Dimension("stages", "parallel.stages", "stages", "layers {}"),
    Dimension("cp", "parallel.context", "context", "cp{}", degree=True),
    Dimension("ep", "parallel.expert", "expert", "ep{}", degree=True),
    Dimension("sequence_parallel", "parallel.sequence", "sequence parallel", "sp"),
    Dimension("zero_stage", "parallel.zero.stage", "zero", "zero{}"),
    Dimension("replicate", "parallel.replicate", "replicate", "replicate{}"),
    Dimension(
        "offload_optimizer",
        "parallel.zero.offload_optimizer",
        "offload of the optimizer",
        "optimizer:{}",
    ),
    Dimension(
        "offload_parameters",
        "parallel.zero.offload_parameters",
        "offload of parameters",
        "parameters:{}",
    ),
    Dimension("micro_batch", "training.micro_batch_size", "micro batch"),
    Dimension("recompute", "parallel.recompute", "recompute", "{} recompute"),
    Dimension("loss", "kernels.loss", "loss", "{} loss"),
    Dimension("compile", "kernels.compile", "compile", "compiled {}"),
    Dimension("fused", "kernels.fused", "fused", "fused by {}"),
    Dimension("experts", "kernels.experts", "experts", "{} experts"),
    Dimension("exchange", "kernels.context", "context exchange", "exchange by {}"),
)
"""All dimensions, in the order of a layout's text."""
DIMENSION: Mapping[str, Dimension] = {one.field: one for one in DIMENSIONS}
"""Every dimension by its field of `Layout`."""
_HOW = DIMENSIONS[DIMENSIONS.index(DIMENSION["recompute"]) :]
"""How ranks compute: recompute and kernels."""
DEGREES: tuple[Dimension, ...] = tuple(one for one in DIMENSIONS if one.degree)


def is_above_one(value: object) -> bool:
    """Whether a degree is stated and splits anything."""
    return isinstance(value, int) and value > 1


def settings(layout: Layout) -> dict[str, Any]:
    """What a recipe states that asks for this layout: values by dotted setting."""
    return {one.key: getattr(layout, one.field) for one in DIMENSIONS}


def degrees(layout: Layout) -> dict[str, int]:
    """The degrees above 1 by field: {"tp": 2, "pp": 4}."""
    fields = (one.field for one in DEGREES)
    return {field: value for field in fields if (value := getattr(layout, field)) > 1}


def degrees_text(engine: str, model: str, layout: Layout) -> str:
    """`megatron dp2 tp2 sp zero1`: engine and what is not the default of a layout."""
    words = [engine if model in ("hf", engine) else f"{engine}/{model}", f"dp{layout.dp}"]
    words += [
        one.text(getattr(layout, one.field))
        for one in DIMENSIONS
        if one.word and one not in _HOW and one.used(layout)
    ]
    return " ".join(words)


def layout_text(engine: str, model: str, layout: Layout) -> str:
    """All of a layout: `megatron dp2 tp2, micro batch 4 × 2, full recompute`."""
    batch = f"micro batch {layout.micro_batch} × {layout.gradient_accumulation}"
    values = vars(layout) | {"recompute": recompute_text(layout)}
    phrases = [one.text(values[one.field]) for one in _HOW if one.used(layout)]
    return ", ".join((degrees_text(engine, model, layout), batch, *phrases))


def batch_text(layout: Layout) -> str:
    """The factors of a global batch: `2 micro batch × 4 accumulation × 8 dp = 64 samples`."""
    often = f"{layout.gradient_accumulation} accumulation"
    split = f"{layout.micro_batch} micro batch × {often} × {layout.dp:,} dp"
    return f"{split} = {layout.global_batch:,} samples"


def recompute_text(layout: Layout) -> str:
    """`full`, `12 layers`, or with a pipeline `1 layer per chunk`."""
    if isinstance(recompute := layout.recompute, str):
        return recompute
    return f"{recompute} layer{'s' * (recompute > 1)}{' per chunk' * (layout.pp > 1)}"


def division_text(chunks: Iterable[int]) -> str:
    """Layers of the chunks of a model: `7 + 2 × 8 + 7`."""
    runs = [(size, len([*run])) for size, run in groupby(chunks)]
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in runs)


def smallest_factor(degree: int) -> int:
    """The smallest prime factor. 1 of 1."""
    return next((n for n in range(2, degree + 1) if degree % n == 0), 1)


def scaled_down(layout: Layout, processes: int) -> Layout:
    """The same kind of layout with at most `processes` ranks: every degree is its smallest
    prime factor, or 1 where that has no room."""
    # Experts are spread over data-parallel ranks, so those come earlier where there are any.
    order = ("tp", "cp", "dp", "pp") if layout.ep > 1 else ("tp", "cp", "pp", "dp")
    spread, small, room = smallest_factor(layout.ep), dict[str, Any](), processes
    # 2 data-parallel ranks suffice, except if experts are sharded over more, or shards or
    # weights are replicated.
    most = max(2, spread, 4 if layout.replicate > 1 else 0)
    for name in order:
        degree = getattr(layout, name)
        degree = min(degree, most) if name == "dp" else smallest_factor(degree)
        small[name] = degree if degree <= room else 1
        room //= small[name]
    split, staged = small["tp"] > 1, small["pp"] > 1
    return replace(
        layout,
        **small,
        ep=1 if small["tp"] * small["dp"] % spread else spread,
        vpp=smallest_factor(layout.vpp) if staged else 1,
        stages=layout.stages if staged else (),
        sequence_parallel=layout.sequence_parallel and split,
        replicate=2 if layout.replicate > 1 and small["dp"] == 4 else 1,
        recompute=1 if isinstance(layout.recompute, int) else layout.recompute,
        micro_batch=1,
        gradient_accumulation=1,
        shares=(),
    )
