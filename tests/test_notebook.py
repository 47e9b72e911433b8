"""docs/notebook.ipynb: its cells run in order, and print what is shown there.

DMT_UPDATE_GOLDEN=1 writes what they print into the notebook.
"""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from tests.warm import SUBPROCESS

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        shown = cell["outputs"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        text = printed.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}]
        cell["execution_count"] = number
        if "DMT_UPDATE_GOLDEN" not in os.environ:
            assert shown == cell["outputs"]
    if "DMT_UPDATE_GOLDEN" in os.environ:
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        NOTEBOOK.write_text(f"{text}\n", encoding="utf-8")
