"""The output of a rehearsal: a table for people, one JSON object for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from toolkit.models.families import model_spec
from toolkit.models.model import read
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
        "verdict": outcome.verdict,
        "why": outcome.why,
    }


def table(reference: Record, outcomes: Sequence[LayoutResult]) -> Table:
    """One row per layout, the reference first; fits into 80 columns."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layout", "ranks", "loss", "grad norm", "Δ loss", "Δ norm", "verdict"):
        left = name in ("layout", "verdict")
        found.add_column(name, justify="left" if left else "right", no_wrap=True)
    found.add_row("reference", "1", *_last(reference), style="dim")
    for outcome in outcomes:
        found.add_row(
            outcome.candidate.name,
            str(outcome.candidate.processes),
            *_last(outcome.record),
            *_differences(outcome),
            Text(outcome.verdict, _COLOURS[outcome.verdict]),
            style="dim" if outcome.skipped else "",
        )
    return found


def reasons(outcomes: Sequence[LayoutResult]) -> Text:
    """Below the table, a line per layout: the first divergence, or why it was not run."""
    lines = [
        Text.assemble((f"{outcome.candidate.name}  ", _COLOURS[outcome.verdict]), outcome.why)
        for outcome in outcomes
        if outcome.why
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
    recipes = rehearsal.original, rehearsal.recipe
    before, after = (recipe.model.config for recipe in recipes)
    assert before is not None and after is not None, "looked up by `prepare`"
    old, new = read(before).config, read(after).config
    sizes = {label: (old[key], new[key]) for key, label in _SIZES.items()}
    large, small = (model_spec(config).parameters.total for config in (before, after))
    model = f"{large:,} → {small:,} parameters" if large != small else "model as it is"
    changes = [f"{label} {a:,} → {b:,}" for label, (a, b) in sizes.items() if a != b]
    was, now = (recipe.training for recipe in recipes)
    rates = (f"{recipe.optimizer.learning_rate:g}" for recipe in recipes)
    shown = {
        "sequence": (was.sequence_length, now.sequence_length),
        "batch": (was.global_batch_size, now.global_batch_size),
        "precision": (was.precision, now.precision),
        "learning rate": (*rates,),
    }
    changes += [f"{key} {a} → {b}" if a != b else f"{key} {b}" for key, (a, b) in shown.items()]
    if was.objective != now.objective:
        changes.append(f"objective {was.objective} → {now.objective}")
    if without_noise(before) != before:
        changes.append("no dropout or jitter")
    return ", ".join([f"rehearsed: {model}", *changes])
