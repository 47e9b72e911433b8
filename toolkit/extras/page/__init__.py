"""One page per report: everything of one or several runs, in a file that needs nothing else.

Python says what there is (`page_data`, plain JSON); `page.js` draws it, with uPlot (MIT
licence, `uPlot.LICENSE`), and takes every text for text. Nothing is fetched: the page's own
policy forbids it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import DataError
from toolkit.extras.page.charts import MOST_MARKS, charts, marks
from toolkit.extras.page.sections import Section, sections, tiles
from toolkit.extras.page.thinning import Curves
from toolkit.report.compare import (
    difference,
    names_of,
    settings_that_differ,
    verdict,
    where_losses_differ,
)
from toolkit.report.record import RunRecord
from toolkit.run import jsonl
from toolkit.run.changes import shown
from toolkit.system.atomic import write_atomically
from toolkit.system.untrusted import read_bytes
from toolkit.text.terminal import printable

_FOLDER = Path(__file__).parent
_BEGINS = b"<!doctype html>"
"""A page; nothing else is overwritten."""


def page(data: Mapping[str, Any]) -> str:
    """The page of `page_data` or of a tuning; where the data has a version, the page asks its
    server for news."""
    parts = {
        "CONNECT": "'self'" if "version" in data else "'none'",
        "STYLE": _file("uPlot.min.css") + _file("page.css"),
        "LICENSE": _file("uPlot.LICENSE"),
        "DATA": embedded(data),
        "CHARTS": _file("uPlot.iife.min.js"),
        "SCRIPT": _file("page.js"),
        "MADE": data.get("made", "dmt report"),
        "FROM": "" if "made" in data else " from the run directory alone",
    }
    # At once: nothing that was put in is looked into.
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON for a script element: nothing in it ends the element or begins another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything on the page, as JSON knows it; secrets are masked."""
    names = names_of(records)
    curves = [Curves.of(record.metrics) for record in records]
    runs = []
    for name, record, one in zip(names, records, curves, strict=True):
        state, why = record.state
        found = marks(record, one)
        runs.append(
            {
                "name": name,
                "state": state,
                "why": why,
                "tiles": tiles(record),
                "marks": found[-MOST_MARKS:],
                "more_marks": max(0, len(found) - MOST_MARKS),
                "sections": sections(record),
                "missing": record.missing,
                "lines": len(record.metrics),
            }
        )
    data = {
        "runs": runs,
        "charts": charts(records, curves),
        "comparison": _comparison(records, names),
    }
    # Without characters that would reorder or hide what stands next to them.
    return jsonl.plain(data, partial(printable, lines=True))  # type: ignore[no-any-return]


def page_of_one(
    name: str,
    state: str,
    why: str,
    tiles: Sequence[Sequence[str]],
    sections: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The data of a page on something else than runs: without curves and marks."""
    run = {"name": name, "state": state, "why": why, "tiles": tiles, "sections": sections}
    empty = {"marks": [], "more_marks": 0, "missing": [], "lines": 0}
    return {"runs": [run | empty], "charts": [], "comparison": None}


def _comparison(records: Sequence[RunRecord], names: Sequence[str]) -> Section | None:
    """What differs between several runs; None for one."""
    if len(records) < 2:
        return None
    first, *others = records
    found = [difference(first, other) for other in others]
    items = [
        f"{verdict(name, names[0], one)}. Loss: {where_losses_differ(one)}."
        for name, one in zip(names[1:], found, strict=True)
    ]
    settings = settings_that_differ(records)
    table = [["setting", *names], *([key, *map(shown, row)] for key, row in settings.items())]
    return {"title": "What differs", "items": items, "table": table}


def write_page(records: Sequence[RunRecord], path: Path) -> None:
    """Write the page. Raises DataError when `path` is another file or cannot be written."""
    write(page_data(records), path)


def write(data: Mapping[str, Any], path: Path) -> None:
    """Write the page of this data. Raises DataError as `write_page`."""
    text = page(data)
    require_page(path)
    with _writing(path):
        write_atomically(path, text)


def require_page(path: Path) -> None:
    """Raises DataError when `path` is another file, or in no folder."""
    with _writing(path):
        if path.exists() and not read_bytes(path).startswith(_BEGINS):
            raise DataError(f"--html: {path} is no page", fix="name another file, or remove it")
        path.absolute().parent.stat()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"--html: {path} cannot be written ({why})", fix="name another file"
        ) from error
