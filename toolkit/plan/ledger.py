"""The ledger: what a layout computes exactly as the plain run, and what it approximates.

The plain run is the same recipe in one process, fp32, the whole global batch at once, in
transformers. Every entry is derived from recipe and plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.backend import BACKENDS
from toolkit.layout import Fp8Scaling, Layout, padded_vocab
from toolkit.models.model import is_dropout
from toolkit.models.spec import ModelSpec
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import ChatRowsSource, Recipe

Kind = Literal["exact", "approximated"]
KINDS: tuple[Kind, ...] = ("exact", "approximated")


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger."""

    kind: Kind
    what: str
    """A short name: `token-mean loss`."""
    why: str
    """The reason, with the numbers of this plan."""


def ledger(
    recipe: Recipe,
    plan: Plan,
    spec: ModelSpec,
    config: Mapping[str, object] | None = None,
    engine_config: Mapping[str, Any] | None = None,
) -> list[LedgerEntry]:
    """Every entry of this plan, exact ones first.

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
    found = {
        "exact": _exact(recipe, plan, spec),
        "approximated": [
            *_approximated(recipe, plan, spec, random),
            *of_engine,
        ],
    }
    return [LedgerEntry(kind, what, why) for kind in KINDS for what, why in found[kind]]


def summary(entries: Sequence[LedgerEntry]) -> list[str]:
    """One line per kind that names its entries."""
    lines = []
    for kind in KINDS:
        if names := [entry.what for entry in entries if entry.kind == kind]:
            lines.append(f"{kind}: {', '.join(names)}")
    return lines


def _exact(recipe: Recipe, plan: Plan, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    layout, optimizer = plan.layout, recipe.optimizer
    if recipe.model.init == "random":
        yield "initial weights", "drawn from the seed and each parameter's name and indices"
    else:
        yield (
            "initial weights",
            f"every rank reads its part of {recipe.model.checkpoint or recipe.model.hub}",
        )
    if recipe.training.deterministic:
        yield "repeated runs", "bitwise equal in this layout, with the same packages and GPUs"
    yield "data order", "global batch k follows from the seed and k, under any world size"
    if (ramp := recipe.training.batch_ramp) is not None:
        sizes = f"{ramp.start} to {recipe.training.global_batch_size} samples a step"
        yield "batch ramp", f"{sizes}, always the next ones of the same order"
    if isinstance(recipe.data.train, tuple):
        yield "blended sources", "each has its share of every prefix to within one sample"
    if recipe.data.isolates:
        yield "isolated documents", "a token attends to its own only, and positions restart"
    elif not all(isinstance(one, ChatRowsSource) for one in recipe.data.sources):
        yield "packed documents", "attention crosses those of a sequence, in every layout"
    parts = layout.dp * layout.gradient_accumulation
    split = f", not of its {parts:,} parts" if parts > 1 else ""
    pairs = recipe.training.rows_per_sample > 1
    what, items = ("pair-mean", "pairs") if pairs else ("token-mean", "unmasked tokens")
    yield f"{what} loss", f"the mean over the {items} of the whole batch{split}"
    if recipe.adapter is not None and spec.moe_layers:
        yield "experts without adapters", "adapters are of attention: experts do not train"
    if recipe.model.balance is not None:
        yield "balance of experts", "defined by the sequences of the whole batch"
    if optimizer.kind.ledger.exact:
        yield optimizer.kind.ledger.exact
    yield "optimizer states", optimizer.kind.ledger.states
    if plan.attention is not None:
        kernel = plan.attention_kernel
        first = f", {kernel}'s kernel first," if kernel in ("cudnn", "flash") else ""
        how = kernel if kernel == "varlen" else plan.attention
        yield "attention", f"{how}{first} in every engine and model implementation"
    yield from _exact_activations(layout)
    rows = spec.vocab if plan.model == "hf" else padded_vocab(spec.vocab, layout.tp)
    if layout.loss == "chunked":
        yield "loss in chunks", "the logits of some tokens at a time, the same numbers"
    if rows != spec.vocab:
        yield (
            "padded vocabulary",
            f"{spec.vocab:,} rows padded to {rows:,} for tensor {layout.tp}; the added ones "
            "are masked out of the softmax and never exported",
        )


def _exact_activations(layout: Layout) -> Iterator[tuple[str, str]]:
    if layout.cp > 1:
        spread = f"the positions of a row on {layout.cp} ranks, each at its own place"
        yield "context parallel", f"{spread}; {layout.exchange} lets it see the whole row"
    if layout.stages:
        yield "uneven pipeline", "the same layers in the same order, on other ranks"
    if layout.recompute != "none":
        yield "recompute", "the backward pass repeats the forward pass with the same numbers"


def _approximated(
    recipe: Recipe, plan: Plan, spec: ModelSpec, random: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    layout, precision = plan.layout, recipe.training.precision
    if precision != "fp32":
        yield precision, f"computed in {precision}, weights updated in fp32"
    if (scaling := recipe.kernels.fp8) is not None:
        yield "fp8", _fp8_words(scaling)
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
    if sums := _split_sums(plan):
        yield "order of sums", f"{sums}: the same terms, other last digits"
    ledger = recipe.optimizer.kind.ledger
    if ledger.amplified and (sums or precision != "fp32"):
        yield ledger.amplified
    if ledger.approximated:
        yield ledger.approximated
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


def _fp8_words(scaling: Fp8Scaling) -> str:
    """Which products are rounded, and whether the layout changes their scales."""
    products = f"matrix products of the layers round their operands to 8 bits, scaled {scaling}"
    if scaling == "tensorwise":
        return f"{products}: by one number per micro batch and rank, which the layout changes"
    return f"{products}: alike in every layout, but another last digit may flip a code"


def _split_sums(plan: Plan) -> str:
    """Sums that this layout splits. Empty if nothing is split."""
    layout = plan.layout
    gradients = (
        ("micro batches", layout.gradient_accumulation),
        ("data-parallel ranks", layout.dp),
        ("context-parallel ranks", layout.cp),
    )
    found = [f"{count:,} {over}" for over, count in gradients if count > 1]
    sums = [f"gradients over {' and '.join(found)}"] if found else []
    if layout.ep > 1:
        holders = layout.dp * layout.tp // layout.ep
        sums.append(f"those of experts over the {holders:,} that hold them")
    if layout.tp > 1:
        sums.append(f"activations over {layout.tp} tensor-parallel ranks")
    return ", ".join(sums)
