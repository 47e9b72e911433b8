"""`dmt eval` and `dmt chat` against the harness's own command line and plain transformers."""

import fcntl
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.dmt import Dmt
from tests.e2e.conftest import WORDS
from tests.e2e.product import events
from toolkit.run.directory import RunDirectory
from toolkit.run.evaluations import Recorded, record

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
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
OWN = ("--tasks", "next_word")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task of our own, whose data are a local file."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"text": f"a {WORDS[n % 11]} and", "words": [*WORDS[n % 7 :][:3]], "right": n % 3}
        for n in range(24)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    return folder


def test_tasks_of_a_run(ddp_run: Path, tasks: Path, dmt: Dmt) -> None:
    """The harness's numbers, in the run; what a kill has left is gone, not what is in use."""
    run_dir = shutil.copytree(ddp_run, tasks.parent / "run")
    out = tasks.parent / "harness"
    harness = subprocess.Popen(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", *OWN),
            *("--model_args", f"pretrained={ddp_run / 'export'}", "--batch_size", "8"),
            *("--include_path", tasks, "--device", "cpu", "--output_path", out),
        ],
        stdout=subprocess.DEVNULL,
    )
    work = run_dir / "evaluations"
    left, used = (work / f".export-of-dmt-eval-{name}" for name in ("left", "used"))
    for folder in (left, used):
        (folder / "export").mkdir(parents=True)
        (folder / "lock").touch()
    held = (used / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)  # as a `dmt chat` of the same step
    printed = dmt("eval", run_dir, *OWN, "--include-path", tasks, "--json").json
    assert harness.wait() == 0
    (results,) = out.rglob("results_*.json")
    expected = json.loads(results.read_text())["results"]["next_word"]
    found = printed["findings"]["tasks"]["next_word"]
    assert {*found} == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert found == {name: expected[f"{name},none"] for name in found}
    assert [path.name for path in work.glob(".*")] == [used.name]
    held.close()
    before = dmt("report", ddp_run, "--json").json
    report = dmt("report", run_dir, "--json").json
    (recorded,) = report["evaluations"]
    assert (recorded["step"], recorded["findings"]) == (20, {"next_word": found})
    assert report["total_s"] == before["total_s"], "no part of the run"
    assert f"next_word acc {found['acc']:.4f}" in dmt("report", run_dir).out
    assert events(run_dir, "evaluation_tasks")[0]["tasks/next_word/acc"] == found["acc"]
    sample = {"prompt": "a model", "completion": "reads tokens"}
    record(RunDirectory(run_dir), "samples", Recorded("samples", 20, {}, [sample]))
    dmt("report", run_dir, "--html", tasks.parent / "page.html")
    page = (tasks.parent / "page.html").read_text()
    assert all(text in page for text in ("next_word/acc_norm", "Completions", "reads tokens"))


def test_what_is_missing_is_named(ddp_run: Path, tasks: Path, dmt: Dmt) -> None:
    """An unknown task, and data that are neither here nor to be had."""
    unknown = dmt(
        "eval", ddp_run / "export", "--tasks", "next_wort", "--include-path", tasks, code=2
    )
    assert "has no task next_wort" in unknown.err and "did you mean `next_word`?" in unknown.err
    text = (tasks / "task.yaml").read_text().replace("json", "no/such-data", 1)
    (tasks / "task.yaml").write_text(text)
    gone = dmt("eval", ddp_run / "export", *OWN, "--include-path", tasks, code=2)
    assert "no/such-data" in gone.err and "HF_HUB_OFFLINE" in gone.err
    assert "it is empty" in dmt("eval", ddp_run, "--prompt", "", code=2).err
    assert "Traceback" not in unknown.err + gone.err
    text = text.replace("no/such-data", "json").replace("_split: test", "_split: none")
    (tasks / "task.yaml").write_text(text)
    broken = dmt("eval", ddp_run / "export", *OWN, "--include-path", tasks, code=2)
    assert "look at the traceback" in broken.err and "HF_HUB_OFFLINE" not in broken.err


def test_chat_completes_lines(ddp_run: Path, dmt: Dmt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a model\n\nwhich of\n"))
    printed = dmt("chat", ddp_run / "export", "--max-tokens", 9)
    assert "no chat template" in printed.err
    assert printed.out == "".join(completed(ddp_run / "export")("a model", "which of"))


def completed(folder: Path) -> Callable[..., list[str]]:
    """Greedy completions by transformers alone, a line each."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def complete(*prompts: str) -> list[str]:
        inputs = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
        outs = [model.generate(**one, do_sample=False, max_new_tokens=9) for one in inputs]
        lengths = [one["input_ids"].shape[1] for one in inputs]
        return [
            tokenizer.decode(out[0, length:]) + "\n"
            for out, length in zip(outs, lengths, strict=True)
        ]

    return complete
