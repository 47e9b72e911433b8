"""Dimensions of a layout: its degrees and switches, each with all that is known about it.

A new one is a field of `Layout`, a setting of the recipe's schema, its row here, its memory and
time in `plan/cost/`, and what an engine's `Support` says of it. Planner, checks, explanations,
tables, `dmt init` and rehearsals read the rows. The data-parallel degree and the accumulation
have none: they follow from the others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.layout import Layout
from toolkit.recipe.schema import Recipe


class Need(NamedTuple):
    """What a value of a setting needs of another setting."""

    values: Callable[[Any], bool]
    """Values of this setting that have the need."""
    other: str
    """The other setting, dotted."""
    allowed_if: Callable[[Any], bool]
    """Values of the other one that they go with."""
    allowed: str
    """What this setting may be otherwise."""


def _never(_: object) -> bool:
    return False


def _as_is(value: Any, _: Mapping[str, int]) -> Any:
    return value


@dataclass(frozen=True)
class Dimension:
    """One degree or switch of a layout."""

    field: str
    """Of `Layout`, whose default is the value of a layout without it."""
    key: str
    """The recipe's setting, dotted; empty where no recipe decides it yet."""
    name: str
    """In reasons."""
    word: Callable[[Any], str] | None = None
    """A value in a layout's text: `tp2`; of kernels and recompute, in its long one."""
    degree: bool = False
    """It multiplies the ranks or the parts of a model; 1 is none."""
    needs: tuple[Need, ...] = ()
    disruption: int | None = None
    """The place of the setting among those that could be left to `auto`, the smaller changes
    first; None: it is never proposed."""
    parts: Callable[[Any], int] = _never
    """How much a value that is not the default complicates a layout."""
    scaled: Callable[[Any, Mapping[str, int]], Any] = _as_is
    """The value in a rehearsal, from its degrees `tp`, `pp`, `dp` and `ep`."""

    @property
    def setting(self) -> str:
        """The last part of the key: `tensor`."""
        return self.key.rpartition(".")[2]

    def of(self, recipe: Any) -> Any:
        """What a recipe, or a request of one, states."""
        return attrgetter(self.key)(recipe)

    def used(self, layout: Layout) -> bool:
        """Whether a layout has another value than the default."""
        return bool(getattr(layout, self.field) != getattr(_PLAIN, self.field))

    def named(self, value: Any) -> str:
        """A value in a reason: `tensor 8`, `sequence parallel true`."""
        if isinstance(value, tuple):
            return self.word(value) if value and self.word else f"even {self.name}"
        if isinstance(value, bool):
            return f"{self.name} {str(value).lower()}"
        if self.field == "recompute" and isinstance(value, int):
            return f"{self.name} {value} layer{'s' * (value > 1)}"
        return f"{self.name} {value}"


_PLAIN = Layout()


def is_above_one(value: object) -> bool:
    """Whether a degree is stated and splits anything."""
    return isinstance(value, int) and value > 1


def _is_offloaded(value: object) -> bool:
    return value not in ("none", "auto")


def smallest_factor(degree: int) -> int:
    """The smallest prime factor; 1 of 1."""
    return next((n for n in range(2, degree + 1) if degree % n == 0), 1)


def _replicated(value: int, small: Mapping[str, int]) -> int:
    return 2 if value > 1 and small["dp"] == 4 else 1


def division_text(chunks: Iterable[int]) -> str:
    """Layers of the chunks of a model: `7 + 2 × 8 + 7`."""
    runs = [(size, len([*run])) for size, run in groupby(chunks)]
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in runs)


_STAGE = "parallel.zero.stage"


def _degree(field: str, name: str, *, key: str | None = None, **more: Any) -> Dimension:
    """A degree of parallelism, whose setting is called as it is in reasons."""
    if key is None:
        key = f"parallel.{name.replace(' ', '_')}"
    word = f"{field}{{}}".format
    return Dimension(field, key, name, word, degree=True, parts=is_above_one, **more)


DIMENSIONS: tuple[Dimension, ...] = (
    _degree("tp", "tensor", disruption=13),
    _degree("pp", "pipeline", disruption=14),
    _degree(
        "vpp",
        "virtual pipeline",
        needs=(
            Need(
                is_above_one,
                "parallel.pipeline",
                lambda pipeline: pipeline != 1,
                "1 without pipeline stages",
            ),
        ),
        disruption=12,
        scaled=lambda value, small: smallest_factor(value) if small["pp"] > 1 else 1,
    ),
    Dimension(
        "stages",
        "parallel.stages",
        "stages",
        lambda chunks: f"layers {division_text(chunks)}".replace(" + ", "+").replace(
            " × ", "×"
        ),
        parts=bool,
        scaled=lambda chunks, small: chunks if small["pp"] > 1 else (),
    ),
    _degree("cp", "context", disruption=16),
    _degree(
        "ep",
        "expert",
        disruption=15,
        scaled=lambda _, small: (
            small["ep"] if small["tp"] * small["dp"] % small["ep"] == 0 else 1
        ),
    ),
    Dimension(
        "sequence_parallel",
        "parallel.sequence",
        "sequence parallel",
        lambda _: "sp",
        needs=(
            Need(
                lambda value: value is True,
                "parallel.tensor",
                lambda tensor: tensor != 1,
                "true only inside a tensor-parallel group",
            ),
        ),
        disruption=11,
        scaled=lambda value, small: value and small["tp"] > 1,
    ),
    Dimension(
        "zero_stage",
        _STAGE,
        "zero",
        "zero{}".format,
        disruption=7,
        parts=lambda stage: stage == 3,
    ),
    Dimension(
        "replicate",
        "parallel.replicate",
        "replicate",
        "replicate{}".format,
        needs=(
            Need(
                is_above_one,
                "parallel.zero.offload_parameters",
                lambda place: not _is_offloaded(place),
                "1 with offload, which is for models that copies of shards leave no room for",
            ),
        ),
        disruption=8,
        parts=is_above_one,
        scaled=_replicated,
    ),
    Dimension(
        "offload_optimizer",
        "parallel.zero.offload_optimizer",
        "offload of the optimizer",
        "optimizer:{}".format,
        needs=(
            Need(
                lambda place: place == "nvme",
                _STAGE,
                lambda stage: stage in (3, "auto"),
                "nvme in stage 3 only; below it, DeepSpeed keeps the states in CPU memory "
                "silently",
            ),
            Need(
                lambda place: place == "cpu",
                _STAGE,
                lambda stage: stage != 0,
                "none in stage 0, which shards no optimizer states",
            ),
        ),
        disruption=9,
        parts=_is_offloaded,
    ),
    Dimension(
        "offload_parameters",
        "parallel.zero.offload_parameters",
        "offload of parameters",
        "parameters:{}".format,
        needs=(
            Need(
                _is_offloaded,
                _STAGE,
                lambda stage: stage in (3, "auto"),
                "none below stage 3, which alone shards parameters",
            ),
        ),
        disruption=10,
        parts=_is_offloaded,
    ),
    Dimension(
        "micro_batch",
        "training.micro_batch_size",
        "micro batch",
        disruption=6,
        scaled=lambda _, __: 1,
    ),
    Dimension(
        "recompute",
        "parallel.recompute",
        "recompute",
        "{} recompute".format,
        disruption=5,
        parts=lambda value: (value != "none") + isinstance(value, int),
        scaled=lambda value, _: 1 if isinstance(value, int) else value,
    ),
    Dimension(
        "loss",
        "kernels.loss",
        "loss",
        "{} loss".format,
        disruption=0,
        parts=lambda kernel: kernel != "whole",
    ),
    Dimension("compile", "kernels.compile", "compile", "compiled {}".format, disruption=1),
    Dimension("fused", "kernels.fused", "fused", "fused by {}".format, disruption=2),
    Dimension("experts", "kernels.experts", "experts", "{} experts".format, disruption=3),
    Dimension(
        "exchange",
        "kernels.context",
        "context exchange",
        "exchange by {}".format,
        disruption=4,
        parts=lambda exchange: exchange != _PLAIN.exchange,
    ),
)
"""In the order of a layout's text."""
DIMENSION: Mapping[str, Dimension] = {one.field: one for one in DIMENSIONS}
"""By the field of `Layout`."""


def _is_setting(key: str) -> bool:
    """Whether the schema has it: that of a feature may be missing."""
    section: Any = Recipe
    for name in key.split("."):
        field = section.model_fields.get(name)
        if field is None:
            return False
        section = field.annotation
    return True


SETTABLE: tuple[Dimension, ...] = tuple(one for one in DIMENSIONS if _is_setting(one.key))
"""Those that a recipe decides."""
_HOW = DIMENSIONS[DIMENSIONS.index(DIMENSION["recompute"]) :]
"""How ranks compute: recompute and kernels."""
DEGREES: tuple[Dimension, ...] = tuple(one for one in DIMENSIONS if one.degree)


def settings(layout: Layout) -> dict[str, Any]:
    """What a recipe states that asks for this layout: values by dotted setting."""
    return {one.key: getattr(layout, one.field) for one in SETTABLE}


def degrees(layout: Layout) -> dict[str, int]:
    """The degrees above 1 by field: {"tp": 2, "pp": 4}."""
    fields = (one.field for one in DEGREES)
    return {field: value for field in fields if (value := getattr(layout, field)) > 1}


def degrees_text(engine: str, model: str, layout: Layout) -> str:
    """`megatron dp2 tp2 sp zero1`: engine and what is not the default of a layout."""
    words = [engine if model in ("hf", engine) else f"{engine}/{model}", f"dp{layout.dp}"]
    words += [
        one.word(getattr(layout, one.field))
        for one in DIMENSIONS
        if one.word and one not in _HOW and one.used(layout)
    ]
    return " ".join(words)


def layout_text(engine: str, model: str, layout: Layout) -> str:
    """All of a layout: `megatron dp2 tp2, micro batch 4 × 2, full recompute`."""
    batch = f"micro batch {layout.micro_batch} × {layout.gradient_accumulation}"
    values = vars(layout) | {"recompute": recompute_text(layout)}
    phrases = [one.word(values[one.field]) for one in _HOW if one.word and one.used(layout)]
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


def scaled_down(layout: Layout, processes: int) -> Layout:
    """The same kind of layout with at most `processes` ranks: every degree is its smallest
    prime factor, or 1 where that has no room."""
    # Experts are spread over data-parallel ranks, so those come earlier where there are any.
    order = ("tp", "cp", "dp", "pp") if layout.ep > 1 else ("tp", "cp", "pp", "dp")
    small, room = {"ep": smallest_factor(layout.ep)}, processes
    for name in order:
        # 2 data-parallel ranks suffice, except if experts are sharded over more, or shards or
        # weights are replicated.
        most = max(2, small["ep"], 4 if layout.replicate > 1 else 0)
        degree = (
            min(layout.dp, most) if name == "dp" else smallest_factor(getattr(layout, name))
        )
        small[name] = degree if degree <= room else 1
        room //= small[name]
    values = {
        one.field: one.scaled(getattr(layout, one.field), small)
        for one in DIMENSIONS
        if one.field not in small or one.field == "ep"
    }
    degrees = {name: small[name] for name in order}
    return Layout(**(values | degrees))
