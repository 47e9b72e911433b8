"""The output of a rehearsal: a table for people, one JSON object for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from toolkit.models.families import model_spec, settings_of
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.rehearsal import LayoutResult, Rehearsal
from toolkit.rehearse.shrink import without_noise
from toolkit.run import jsonl

_COLOURS = {"exact": "green", "within": "green", "diverged": "bold red", "skipped": "dim"}
_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key/value heads",
    "num_experts": "experts",
    "vocab_size": "vocabulary",
}
"""Config keys that the first line shows where they were changed."""


def verdict(outcome: LayoutResult) -> str:
    """`exact`, `within`, `diverged` or `skipped`; a layout that failed has diverged."""
    if outcome.skipped is not None:
        return "skipped"
    return outcome.comparison.verdict if outcome.comparison else "diverged"


def why(outcome: LayoutResult) -> str:
    """The reason of a verdict, on one line; empty where everything is the same."""
    if outcome.skipped is not None:
        return outcome.skipped
    if outcome.failure is not None:
        done = len(outcome.record.loss)
        return f"failed{f' after step {done}' if done else ''}: {outcome.failure.why}"
    first = outcome.comparison.first if outcome.comparison else None
    return str(first) if first else ""


def machine_output(reference: Record, outcomes: Sequence[LayoutResult]) -> dict[str, Any]:
    """What `--json` prints; a number that is not finite is a string, as in metrics.jsonl."""
    found: dict[str, Any] = jsonl.plain(
        {"reference": asdict(reference), "layouts": [_entry(outcome) for outcome in outcomes]}
    )
    return found


def _entry(outcome: LayoutResult) -> dict[str, Any]:
    plan, comparison = outcome.plan, outcome.comparison
    return {
        "name": outcome.candidate.name,
        "engine": outcome.candidate.parallel.engine,
        "model": outcome.candidate.parallel.model,
        "world": outcome.candidate.processes,
        "layout": plan.layout.to_dict() if plan else None,
        "loss": outcome.record.loss,
        "grad_norm": outcome.record.grad_norm,
        "max_rel_loss": comparison.max_rel_loss if comparison else None,
        "max_rel_grad_norm": comparison.max_rel_grad_norm if comparison else None,
        "verdict": verdict(outcome),
        "why": why(outcome),
    }


def table(reference: Record, outcomes: Sequence[LayoutResult]) -> Table:
    """One row per layout, the reference first; fits into 80 columns."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layout", "ranks", "loss", "grad norm", "Δ loss", "Δ norm", "verdict"):
        justify: Literal["left", "right"] = "left" if name in ("layout", "verdict") else "right"
        found.add_column(name, justify=justify, no_wrap=True)
    found.add_row("reference", "1", *_last(reference), style="dim")
    for outcome in outcomes:
        result = verdict(outcome)
        found.add_row(
            outcome.candidate.name,
            str(outcome.candidate.processes),
            *_last(outcome.record),
            *_differences(outcome),
            Text(result, _COLOURS[result]),
            style="dim" if result == "skipped" else "",
        )
    return found


def reasons(outcomes: Sequence[LayoutResult]) -> Text:
    """Below the table, a line per layout: the first divergence, or why it was not run."""
    lines = [
        Text.assemble((f"{outcome.candidate.name}  ", _COLOURS[verdict(outcome)]), why(outcome))
        for outcome in outcomes
        if why(outcome)
    ]
    return Text("\n").join(lines)


def _last(record: Record) -> tuple[str, str]:
    if not record.loss:
        return "", ""
    return f"{record.loss[-1]:.6f}", f"{record.grad_norm[-1]:.6f}"


def _differences(outcome: LayoutResult) -> tuple[str, str]:
    if outcome.comparison is None:
        return "", ""
    return (
        f"{outcome.comparison.max_rel_loss:.0e}",
        f"{outcome.comparison.max_rel_grad_norm:.0e}",
    )


def shrunk(rehearsal: Rehearsal) -> str:
    """One line: what was made smaller, from → to, and the precision."""
    original, small = rehearsal.original, rehearsal.recipe
    changes = [
        *_size_changes(_config(original), _config(small)),
        *_training_changes(original, small),
    ]
    before, after = (_parameters(_config(recipe)) for recipe in (original, small))
    model = f"{before:,} → {after:,} parameters" if before != after else "model as it is"
    return ", ".join([f"rehearsed: {model}", *changes])


def _config(recipe: Recipe) -> Mapping[str, Any]:
    assert recipe.model.config is not None, "looked up by `prepare`"
    return recipe.model.config


def _parameters(config: Mapping[str, Any]) -> int:
    return model_spec(config).parameters.total


def _size_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = settings_of(before), settings_of(after)
    return [
        f"{label} {old[key]:,} → {new[key]:,}"
        for key, label in _SIZES.items()
        if old[key] != new[key]
    ]


def _training_changes(original: Recipe, small: Recipe) -> list[str]:
    old, new = original.training, small.training
    rates = (recipe.optimizer.learning_rate for recipe in (original, small))
    shown = {
        "sequence": (old.sequence_length, new.sequence_length),
        "batch": (old.global_batch_size, new.global_batch_size),
        "precision": (old.precision, new.precision),
        "learning rate": tuple(f"{rate:g}" for rate in rates),
    }
    changes = [f"{key} {a} → {b}" if a != b else f"{key} {b}" for key, (a, b) in shown.items()]
    if old.objective != new.objective:
        changes.append(f"objective {old.objective} → {new.objective}")
    noisy = without_noise(_config(original)) != _config(original)
    return [*changes, "no dropout or jitter"] if noisy else changes
