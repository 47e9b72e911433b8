"""The words, bars and tables of the page for one run."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.extras.page.charts import MOST_MARKS
from toolkit.layout import Layout
from toolkit.plan.dimensions import layout_text
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.removed import without_unset
from toolkit.report.attempts import number
from toolkit.report.compare import median_speed
from toolkit.report.goodput import PARTS
from toolkit.report.record import RunRecord
from toolkit.system.untrusted import read_bytes
from toolkit.text.dotted import leaves
from toolkit.text.units import duration, seconds, size

Section = dict[str, Any]
"""`title`, and any of `note`, `bar` ([name, amount, text]), `facts` ([name, text]), `table`
(the header first), `items` and `text` (shown when it is opened)."""


def sections(record: RunRecord, happened: Sequence[Mapping[str, Any]]) -> list[Section]:
    """All sections of a run, in the order of the page."""
    found = [
        {"title": "Summary", "facts": [*map(list, record.rows())]},
        _time(record),
        _parts(record, "step_time_s", "One step, as predicted", seconds),
        _memory(record),
        _recipe(record),
        _plan(record),
        _what_happened(happened),
    ]
    return [section for section in found if section is not None]


def tiles(record: RunRecord) -> list[list[str]]:
    """The numbers at the top: what, how much, and a remark."""
    summary, last = record.summary, record.metrics[-1] if record.metrics else {}
    total = record.recipe.get("training", {}).get("steps")
    found = [["steps", f"{summary.steps:,}", f"of {total:,}" if total else ""]]
    if summary.losses is not None:
        first, final = summary.losses
        found.append(["loss", f"{final.value:.4f}", f"from {first.value:.4f}"])
    if summary.validation is not None:
        step = f"at step {summary.validation.step:,}"
        found.append(["validation loss", f"{summary.validation.value:.4f}", step])
    if (speed := median_speed(record.metrics)) is not None:
        found.append(["tokens/s", f"{speed:,.0f}", "median"])
    if (mfu := number(last, "mfu")) is not None:
        promised = number(record.plan, "mfu")
        found.append(["MFU", f"{mfu:.1%}", f"{promised:.1%} predicted" if promised else ""])
    spent = record.spent
    if spent.share is not None:
        share = spent.percentages()["productive"]
        found.append(["goodput", f"{share}%", f"of {duration(spent.total_s)}"])
    return found


def _time(record: RunRecord) -> Section | None:
    spent = record.spent
    if spent.share is None:
        return None
    shares = spent.percentages()
    bar = [
        [label, spent.parts_s[name], f"{duration(spent.parts_s[name])}, {shares[name]:.1f}%"]
        for name, label in PARTS.items()
    ]
    note = f"Goodput {shares['productive']:.1f}% of {duration(spent.total_s)}."
    if spent.idle_s > 0:
        note += f" In addition, nothing ran for {duration(spent.idle_s)} between starts."
    return {"title": "Where the time went", "note": note, "bar": bar}


def _parts(record: RunRecord, name: str, title: str, shown: Any) -> Section | None:
    """A prediction by part. None before the run is planned."""
    parts = record.plan["predicted_parts"][name] if record.plan else {}
    bar = [[part, amount, shown(amount)] for part, amount in parts.items() if amount > 0]
    return {"title": title, "bar": bar} if bar else None


def _memory(record: RunRecord) -> Section | None:
    section = _parts(record, "memory_gib", "Memory, as predicted", size)
    peaks = [gib for line in record.metrics if (gib := number(line, "memory_gib")) is not None]
    if section is not None and peaks:
        section["note"] = f"Measured: {size(max(peaks))} at most on the fullest rank."
    return section


def _recipe(record: RunRecord) -> Section | None:
    if not record.recipe:
        return None
    text = read_bytes(record.run.recipe).decode("utf-8")
    section: Section = {"title": "Recipe", "text": text, "open": "All settings"}
    try:
        stated = Recipe.model_validate(without_unset(record.recipe), strict=False)
    except ValidationError:
        return {**section, "note": "It is another release's: defaults are shown, too."}
    values = leaves(stated.model_dump(exclude_defaults=True, mode="json"))
    own = [[key, in_yaml(value)] for key, value in values]
    section["note"] = f"{len(own)} settings differ from the defaults of this release."
    section["table"] = [["setting", "value"], *own]
    return section


def _plan(record: RunRecord) -> Section | None:
    plan = record.plan
    if not plan:
        return None
    layout = layout_text(plan["engine"], plan["model"], Layout.from_dict(plan["layout"]))
    return {"title": "Plan", "facts": [["layout", layout]], "items": plan["reasons"]}


def _what_happened(found: Sequence[Mapping[str, Any]]) -> Section | None:
    """The last marks in words."""
    if not found:
        return None
    shown = found[-MOST_MARKS:]
    rows = [[f"{one['step']:g}", one["word"], one["time"], one["what"]] for one in shown]
    note = f"The last {len(rows)} of {len(found)}." if len(found) > len(rows) else ""
    table = [["step", "", "time (UTC)", "why"], *rows]
    return {"title": "What happened", "note": note, "table": table}
