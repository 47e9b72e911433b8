"""The two lines of docs/checkpoints.md: an export, judged by the harness's own command."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.e2e.conftest import WORDS
from tests.e2e.product import run

pytestmark = pytest.mark.slow

TASK = """
task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{words}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}]
"""
ROWS = [
    {"text": f"a {WORDS[n % 11]} and", "words": [*WORDS[n % 7 :][:3]], "right": n % 3}
    for n in range(24)
]


def test_the_two_lines_of_the_docs(ddp_run: Path, tmp_path: Path, dmt: Dmt) -> None:
    """On a task of our own, whose data are a local file. That the export is the model is in
    tests/checkpoint/test_export.py."""
    lines = re.findall(
        r"^\$ (dmt checkpoint export .*|lm_eval .*)$",
        Path("docs/checkpoints.md").read_text(),
        re.MULTILINE,
    )
    export, judge = (
        line.replace("runs/NAME", str(ddp_run)).replace("arc_easy,hellaswag", "next_word")
        for line in lines
    )
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    _, *words = shlex.split(export)
    dmt(*words[:-1], tmp_path / words[-1])
    more = ("--include_path", ".", "--output_path", "results")
    command = [sys.executable, "-m", *shlex.split(judge), *more]
    run(command, tmp_path, code=0)
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert 0 <= json.loads(results.read_text())["results"]["next_word"]["acc,none"] <= 1
