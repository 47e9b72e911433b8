"""The ledger: what a layout approximates of the plain run. Everything else is exact.

The plain run is the same recipe in one process, fp32, the whole global batch at once, in
transformers. Every entry is derived from recipe and plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.layout import Layout
from toolkit.models.model import is_dropout
from toolkit.models.spec import ModelSpec
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger."""

    what: str
    """A short name: `order of sums`."""
    why: str
    """The reason, with the numbers of this plan."""


def ledger(
    recipe: Recipe,
    plan: Plan,
    spec: ModelSpec,
    config: Mapping[str, object] | None = None,
    engine_config: Mapping[str, Any] | None = None,
) -> list[LedgerEntry]:
    """Every entry of this plan.

    `config` is the hub's config of the model if the recipe states none. `engine_config` is the
    configuration of the plan's engine. Without it, entries follow from the plan only.
    """
    settings = recipe.model.config or {}
    jitter = (settings or config or {}).get("router_jitter_noise")
    # The hub config's dropout is ignored: only the recipe's is used.
    random = {key: settings[key] for key in settings if is_dropout(key)}
    random["router_jitter_noise"] = jitter
    random["adapter.dropout"] = recipe.adapter.dropout if recipe.adapter else None
    of_engine = BACKENDS[plan.engine].approximations(
        plan, recipe.training.precision, engine_config or {}
    )
    found = (*_approximated(recipe, plan, spec, random), *of_engine)
    return [LedgerEntry(what, why) for what, why in found]


def named(entries: Sequence[LedgerEntry]) -> str:
    """The entries' names on one line."""
    return ", ".join(entry.what for entry in entries) or "nothing"


def _approximated(
    recipe: Recipe, plan: Plan, spec: ModelSpec, random: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    layout, precision = plan.layout, recipe.training.precision
    if precision != "fp32":
        yield precision, f"computed in {precision}, weights updated in fp32"
    if (scaling := recipe.kernels.fp8) is not None:
        products = "matrix products of the layers round their operands to 8 bits"
        changes = "; the layout changes the scales" * (scaling == "tensorwise")
        yield "fp8", f"{products}, scaled {scaling}{changes}"
    if (outer := recipe.parallel.outer) is not None:
        how = f"learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
        yield (
            "outer loop",
            f"another algorithm than one large batch: {outer.replicas} replicas train "
            f"{outer.every_steps} steps each, and their weights are merged ({how})"
            + ", a round later"
            * (outer.overlap == "delayed"),
        )
    if plan.loss_scale is not None:
        yield (
            "loss scale",
            f"first {plan.loss_scale:,.0f} times the mean loss over a rank's tokens, in every "
            "engine; steps that overflow are skipped, and which ones do depends on the layout",
        )
    if layout.cp > 1 and layout.exchange == "all_gather" and precision != "fp32":
        yield "keys and values", f"their gradients are summed over context ranks in {precision}"
    if sums := _split_sums(layout):
        yield "order of sums", f"split over {sums}: the same terms, other last digits"
    optimizer = recipe.optimizer.kind
    if optimizer.amplified and (sums or precision != "fp32"):
        yield optimizer.amplified
    if optimizer.approximated:
        yield optimizer.approximated
    if recipe.follows_validation and (sums or precision != "fp32"):
        yield "validation loss", "a step that it decides may come later by a last digit"
    if layout.compile != "none":
        yield "compiled layers", "the same function with fewer roundings, in other last digits"
    if layout.fused == "megatron":
        yield "fused SwiGLU", "megatron-core's kernel: fewer roundings, in other last digits"
    if layout.loss == "liger":
        yield (
            "Liger's loss",
            f"weights of tokens, and sums over some tokens, are in {precision}",
        )
    if layout.fused == "liger":
        yield "Liger's kernels", "the same function with fewer roundings, in other last digits"
    if plan.model == "megatron":
        yield "kernels", "megatron-core computes transformers' function, in other last digits"
    if spec.moe_layers and (sums or plan.model == "megatron" or precision != "fp32"):
        yield "routing", "a near tie between experts may be decided by a last digit"
    plain = layout.world == 1 and layout.gradient_accumulation == 1 and plan.model == "hf"
    if not plain:
        for key, strength in random.items():
            if strength:
                yield key, f"{strength}, but its random numbers differ between layouts"


def _split_sums(layout: Layout) -> str:
    """Over what this layout splits sums. Empty if it splits none."""
    parts = (
        ("micro batches", layout.gradient_accumulation),
        ("data-parallel ranks", layout.dp),
        ("context-parallel ranks", layout.cp),
        ("tensor-parallel ranks", layout.tp),
    )
    return ", ".join(f"{count:,} {over}" for over, count in parts if count > 1)
