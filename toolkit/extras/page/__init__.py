"""One page per report: everything of one or several runs, in a file that needs nothing else.

`page.html.j2` (Jinja) writes every text, bar and table, a short script draws the curves with
uPlot (MIT licence, `uPlot.LICENSE`). Nothing is fetched: the page's own policy forbids it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.extras.page.charts import MOST_MARKS, charts, marks
from toolkit.extras.page.sections import Section, sections, tiles
from toolkit.report.compare import (
    difference,
    names_of,
    settings_that_differ,
)
from toolkit.report.record import RunRecord
from toolkit.run import jsonl
from toolkit.run.changes import shown
from toolkit.system.atomic import write_atomically
from toolkit.text.generated import check_out
from toolkit.text.terminal import printable

_FOLDER = Path(__file__).parent


def page(data: Mapping[str, Any]) -> str:
    """The page of `page_data`."""
    from jinja2 import Environment, FileSystemLoader

    pages = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    runs = data["runs"]
    drawn = {
        "charts": data["charts"],
        "names": [run["name"] for run in runs],
        "marks": [mark for run in runs for mark in run["marks"]],
    }
    groups = [(run["name"], run["sections"]) for run in runs]
    if data["comparison"] is not None:
        groups.insert(0, ("Comparison", [data["comparison"]]))
    return pages.get_template("page.html.j2").render(
        **data,
        groups=groups,
        data=embedded(drawn),
        uplot=_file("uPlot.iife.min.js"),
        uplot_css=_file("uPlot.min.css"),
        license=_file("uPlot.LICENSE"),
    )


def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON for a script element: nothing in it ends the element or begins another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything on the page, as JSON knows it. Secrets are masked."""
    names = names_of(records)
    runs = [
        {
            "name": name,
            "state": record.summary.ending.state,
            "why": record.summary.ending.why,
            "tiles": tiles(record),
            "marks": [
                {key: one[key] for key in ("step", "tone")} for one in found[-MOST_MARKS:]
            ],
            "sections": sections(record, found),
        }
        for name, record in zip(names, records, strict=True)
        for found in [marks(record)]
    ]
    data = {"runs": runs, "charts": charts(records), "comparison": _comparison(records, names)}
    # Without characters that would reorder or hide what stands next to them.
    return jsonl.plain(data, partial(printable, lines=True))  # type: ignore[no-any-return]


def _comparison(records: Sequence[RunRecord], names: Sequence[str]) -> Section | None:
    """The differences between several runs. None for one run."""
    if len(records) < 2:
        return None
    first, *others = records
    found = [difference(first, other) for other in others]
    items = [
        f"Loss of {name}, next to {names[0]}: {one.losses()}."
        for name, one in zip(names[1:], found, strict=True)
    ]
    settings = settings_that_differ(records)
    table = [["setting", *names], *([key, *map(shown, row)] for key, row in settings.items())]
    return {"title": "What differs", "items": items, "table": table}


def write_page(records: Sequence[RunRecord], path: Path) -> None:
    """Write the page. Raises PlanError when `path` is another file or cannot be written."""
    check_out(path, "<!doctype html>", "`dmt report`", "--html")
    write_atomically(path, page(page_data(records)))
