"""Runs that tokenise their text while they train: the same samples, whoever is killed when."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import WORDS, Project, write_project
from tests.e2e.layouts import outcome
from tests.e2e.product import checkpoints, curve, dmt, events, run, settings, steps_logged
from tests.forked import ForkedRanks
from tests.processes import wait_until
from toolkit.data.hashing import CHUNK_ORDER, WINDOW_SAMPLES, derive_key
from toolkit.data.order import permute
from toolkit.train.worker import train_recipe

SEED, LENGTH, BATCH = 7, 32, 8
EVERY_STEPS = 4
STREAMING = {"chunk_mib": 0.002, "shuffled_chunks": 4, "ahead": 1, "keep_gib": 2e-5}
TRAIN = [
    {"kind": "hf", "path": "web-*.jsonl", "label": "web", "weight": 0.7},
    {"kind": "hf", "path": "code.jsonl", "label": "code", "weight": 0.3},
]
STREAMED: dict[str, object] = {
    "data.train": TRAIN,
    "data.validation": {"kind": "text", "files": ["data/0*.txt"]},
    "data.validation_fraction": 0,
    "data.streaming": STREAMING,
    "checkpoint.every_steps": EVERY_STEPS,
}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a blend of files of JSON lines, in chunks of two kilobytes."""
    folder = tmp_path_factory.mktemp("streamed")
    write_project(folder)
    chance = random.Random(2)
    for name, documents in (("web-0", 90), ("web-1", 60), ("code", 6)):
        rows = [
            " ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for _ in range(documents)
        ]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    return Project(folder)


def streams(project: Project, name: str) -> list[dict[str, Any]]:
    return events(project.folder / name, "window")


@pytest.mark.slow
def test_a_blend_in_other_layouts(streamed: Project) -> None:
    """Two ranks and one, resumed with an empty cache, without workers, and prepared."""
    streamed.launch("two", STREAMED)
    expected = curve(streamed.folder / "two")
    found = streams(streamed, "two")
    assert {window["source"] for window in found} == {"web", "code"}
    assert max(window["epoch"] for window in found) >= 1
    one = STREAMED | {
        "cluster.gpus_per_node": 1,
        "training.micro_batch_size": 8,
        "data.streaming": STREAMING | {"workers": 0},
    }
    for steps in (9, 20):
        shutil.rmtree(streamed.folder / "cache" / "tokens" / "chunks")
        streamed.launch("one", one | {"training.steps": steps})
    for step, (loss, norm) in curve(streamed.folder / "one").items():
        assert (loss, norm) == pytest.approx(expected[step], rel=1e-4)
    shutil.rmtree(streamed.folder / "cache" / "tokens" / "chunks")
    prepared = run(
        dmt("data", "prepare", "recipe.yaml", *settings(STREAMED)), streamed.folder, code=0
    )
    assert "train: 156 documents" in prepared.out
    streamed.launch("prepared", STREAMED)
    assert curve(streamed.folder / "prepared") == expected
    shutil.rmtree(streamed.folder / "cache" / "tokens" / "chunks")


@pytest.mark.slow
def test_the_loss_is_that_of_a_plain_loop(streamed: Project) -> None:
    """On the text of the chunks, encoded and cut by hand, in a loop of plain torch."""
    changes = STREAMED | {
        "data.train": {"kind": "hf", "path": "web-*.jsonl"},
        "cluster.gpus_per_node": 1,
        "training.steps": 1,
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0, "clip_grad_norm": 1.0},
    }
    streamed.launch("start", changes)
    model = AutoModelForCausalLM.from_pretrained(streamed.folder / "start/export")
    weights = {"model.init": "pretrained", "model.hub": "start/export", "training.steps": 12}
    streamed.launch("after", changes | weights)
    losses = [loss for loss, _ in curve(streamed.folder / "after").values()]
    samples = plain_samples(streamed.folder)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for expected in losses:
        inputs, labels = map(
            torch.tensor, zip(*[next(samples) for _ in range(BATCH)], strict=True)
        )
        loss = cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(expected, rel=2e-5)
    assert len(losses) == 12


def plain_samples(folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and labels of the first pass over web-0 and web-1."""
    chunks = []
    for name in ("web-0", "web-1"):
        content = (folder / f"{name}.jsonl").read_bytes()
        parts = -(-len(content) // 2097)
        lines, starts = content.splitlines(keepends=True), [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        for part in range(parts):
            low, high = (len(content) * edge // parts for edge in (part, part + 1))
            mine = [
                line
                for line, start in zip(lines, starts[:-1], strict=True)
                if low <= start < high
            ]
            texts = [json.loads(line)["text"] for line in mine]
            chunks.append([token for text in texts for token in [*text.encode(), 256]])
    places = np.arange(len(chunks), dtype=np.uint64)
    order = permute(places, len(chunks), derive_key(SEED, CHUNK_ORDER, 0, 0)).tolist()
    window, size = 0, 1
    while order:
        now, order = order[:size], order[size:]
        cut = [
            tokens[start : start + LENGTH + 1]
            for tokens in (chunks[number] for number in now)
            for start in range(0, len(tokens) - LENGTH, LENGTH)
        ]
        every = np.arange(len(cut), dtype=np.uint64)
        for number in permute(every, len(cut), derive_key(SEED, WINDOW_SAMPLES, 0, 0, window)):
            tokens = cut[int(number)]
            ends = [place for place, token in enumerate(tokens[:-1]) if token == 256]
            yield tokens[:-1], [-100 if n in ends else t for n, t in enumerate(tokens[1:])]
        window, size = window + 1, min(2 * size, 4)


def start(project: Project, name: str) -> ForkedRanks:
    overrides = [f"{key}={value}" for key, value in STREAMED.items()]
    arguments = (project.recipe, overrides, project.folder / name)
    return ForkedRanks(train_recipe, arguments, 2, project.folder)


@pytest.mark.parametrize(
    "trial",
    [
        *(pytest.param(trial, marks=pytest.mark.slow) for trial in range(2)),
        *(pytest.param(trial, marks=pytest.mark.soak) for trial in range(2, 22)),
    ],
)
def test_a_kill(streamed: Project, trial: int) -> None:
    """kill -9 of both ranks, of one, or of the process that tokenises, with an empty cache."""
    whole = streamed.folder / "whole"
    if not whole.exists():
        ranks = start(streamed, "whole")
        assert ranks.end() == [0, 0], ranks.printed()
    chance, name = random.Random(trial), f"killed-{trial}"
    run_dir = streamed.folder / name
    shutil.rmtree(streamed.folder / "cache" / "tokens" / "chunks", ignore_errors=True)
    ranks = start(streamed, name)
    step = chance.randint(0, 18)
    wait_until(
        lambda: (helpers(ranks) and steps_logged(run_dir) >= step) or ranks.has_ended,
        f"step {step}",
        ranks.printed,
    )
    whom = ("ranks", "rank", "tokenising")[trial % 3]
    started = helpers(ranks)
    chosen = list(ranks.ranks().values())
    if whom == "rank":
        chosen = [chance.choice(chosen)]
    for process in started if whom == "tokenising" else chosen:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    done = steps_logged(run_dir)
    codes = ranks.end()
    saved = (checkpoints(run_dir) or [0])[-1]
    print(f"{whom} killed at step {done}, exit codes {codes}, continues from {saved}")
    if whom == "tokenising":
        assert codes == [0, 0], ranks.printed()
    else:
        again = start(streamed, name)
        assert again.end() == [0, 0], again.printed()
    assert outcome(run_dir) == outcome(whole)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


def helpers(ranks: ForkedRanks) -> list[psutil.Process]:
    """The tokenising processes of a run."""
    found = []
    with suppress(psutil.Error):
        for rank in ranks.ranks().values():
            found += [
                one
                for one in rank.children()
                if "toolkit.data.streaming.ahead" in one.cmdline()
            ]
    return found


@pytest.mark.slow
def test_a_malformed_row_in_mid_run(streamed: Project) -> None:
    """One message with file and line, whichever rank or process finds it."""
    rows = [json.dumps({"text": " ".join(WORDS)}) for _ in range(200)]
    rows[150] = '{"text": 5}'
    (streamed.folder / "bad.jsonl").write_text("\n".join(rows))
    bad = STREAMED | {"data.train": {"kind": "hf", "path": "bad.jsonl"}, "training.steps": 60}
    ended = streamed.launch("bad", bad, code=2)
    assert ended.err.count("bad.jsonl:151: `text` holds a number, not text") == 1, ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_malformed_row_that_a_rank_finds_while_it_trains(tmp_path: Path) -> None:
    """The first thing that the user reads is where it is, not that a rank is gone."""
    write_project(tmp_path)
    rows = [json.dumps({"text": f"document {number} of many"}) for number in range(400)]
    rows[300] = json.dumps({"text": [1, 2]})
    (tmp_path / "web.jsonl").write_text("\n".join(rows))
    train = {"kind": "hf", "path": "web.jsonl"}
    streaming = STREAMING | {"shuffled_chunks": 1, "workers": 0}
    changes = STREAMED | {"data.train": train, "data.streaming": streaming}
    ended = Project(tmp_path).launch("run", changes | {"training.steps": 400}, code=2)
    assert steps_logged(tmp_path / "run") > 0, "in mid-run"
    _, first = ended.err.split("error: ", 1)
    assert first.startswith(f"{tmp_path}/web.jsonl:301: `text` holds a list, not text")
    assert ended.err.count("web.jsonl:301") == 1 and "lost contact" not in ended.err
    ends = events(tmp_path / "run", "end")
    assert any("web.jsonl:301" in event["error"] for event in ends)
