"""The two lines of docs/checkpoints.md: an export, judged by the harness's own command."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.dmt import Dmt
from tests.e2e.conftest import WORDS

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
    """On a task of our own, whose data are a local file."""
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
    subprocess.run(command, cwd=tmp_path, check=True)
    (results,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["next_word"]["acc,none"]
    assert found == pytest.approx(accuracy(tmp_path / words[-1]))


@torch.no_grad()
def accuracy(folder: Path) -> float:
    """How often the right word has the largest sum of log-probabilities, in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def likelihood(text: str, word: str) -> float:
        known, tokens = (
            tokenizer(one, return_tensors="pt")["input_ids"] for one in (text, f"{text} {word}")
        )
        first = known.shape[1]
        scores = model(tokens).logits[0, first - 1 : -1].log_softmax(-1)
        return float(scores.gather(1, tokens[0, first:, None]).sum())

    right = 0
    for row in ROWS:
        scores = [likelihood(str(row["text"]), str(word)) for word in row["words"]]
        right += scores.index(max(scores)) == row["right"]
    return right / len(ROWS)
