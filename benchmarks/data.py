"""Tokenising against the bare `tokenizers` library and against one document at a time.

    python benchmarks/data.py [--rounds 5] [--megabytes 20] [--out benchmarks/results/…json]

The text is that of the Python packages on this machine, a JSON line for every 3,000
characters; the tokenizers are a BPE of 16,000 tokens that is trained on a part of it, and the
byte-level one. In each round all of these exist at once, and only one of them runs: every half
second the processes of one are stopped and those of the next go on, so that other load on the
machine slows all of them. Compared is within a round, by the time in which each ran; quoted is
the median. Imports and loading the tokenizer are not counted.

- `bare`: `Tokenizer.encode_batch_fast` on batches of texts that are in memory; its result is
  dropped.
- `jsonl`: `toolkit.data.tokenized.prepare` with all caches empty: JSON is parsed, texts are
  encoded, written in Megatron's format and synced.
- `documents`: the approach of Megatron-LM's preprocess_data.py: a pool of processes parses a
  line and calls the tokenizer of `transformers` on it, the parent adds one document at a time.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
from pairs import Run

DOCUMENT_CHARACTERS = 3000
BATCH_CHARACTERS = 2**20
VOCABULARY = 16_000
TURN_S = 0.5
WORKER = (sys.executable, __file__, "--worker")
os.environ["HF_HUB_OFFLINE"] = "1"
WAYS = ("bare", "jsonl", "documents")


def make_corpus(folder: Path, megabytes: float) -> None:
    """Write corpus.jsonl and the BPE."""
    from tests.data.building import train_bpe

    sources = sorted(Path(json.__file__).parents[1].rglob("*.py"))
    sources += sorted(Path(np.__file__).parents[1].rglob("*.py"))
    learned: list[str] = []
    written = 0
    with (folder / "corpus.jsonl").open("w") as file:
        for path in sources:
            text = path.read_text(errors="replace")
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                part = text[start : start + DOCUMENT_CHARACTERS]
                written += file.write(json.dumps({"text": part}) + "\n")
                if len(learned) < 3000:
                    learned.append(part)
            if written > megabytes * 1e6:
                break
    train_bpe(learned, VOCABULARY, folder / "bpe")


def texts_of(folder: Path) -> Iterator[str]:
    with (folder / "corpus.jsonl").open() as file:
        for line in file:
            yield json.loads(line)["text"]


def backend_of(name: str) -> Any:
    from toolkit.data.tokenizers import encoder, load_tokenizer

    return encoder(load_tokenizer(name), parse_special=False)


def bare(folder: Path, name: str) -> Callable[[], object]:
    """The library alone, on batches as large as those of DMT."""
    backend = backend_of(name)
    per_batch = BATCH_CHARACTERS // DOCUMENT_CHARACTERS
    texts = texts_of(folder)
    batches = list(iter(lambda: list(islice(texts, per_batch)), []))

    def run() -> None:
        for batch in batches:
            backend.encode_batch_fast(batch, add_special_tokens=False)

    return run


def dmt(folder: Path, name: str) -> Callable[[], object]:
    """What a run does before its first step."""
    from toolkit.data.tokenized import prepare
    from toolkit.data.tokenizers import load_tokenizer
    from toolkit.recipe.schema import HfSource

    cache = Path(mkdtemp(dir=folder))
    source = HfSource(kind="hf", path=str(folder / "corpus.jsonl"))
    tokenizer = load_tokenizer(name)
    return lambda: prepare(source, tokenizer, cache=cache)


_tokenizer: Any = None
"""Of a process of the pool."""


def _load(name: str) -> None:
    from toolkit.data.tokenizers import load_tokenizer

    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(name)


def _encode_line(line: str) -> list[int]:
    return list(_tokenizer(json.loads(line)["text"])["input_ids"])


def documents(folder: Path, name: str) -> Callable[[], object]:
    """One document after the other, in a pool of processes."""
    from toolkit.data.indexed import write_indexed
    from toolkit.data.tokenizers import load_tokenizer

    end = load_tokenizer(name).eos_token_id
    pool = multiprocessing.get_context("spawn").Pool(os.cpu_count(), _load, (name,))
    pool.map(len, ["started"] * 100, chunksize=1)

    def run() -> None:
        prefix = Path(mkdtemp(dir=folder)) / "tokens"
        with (folder / "corpus.jsonl").open() as file:
            encoded = pool.imap(_encode_line, file, 32)
            write_indexed(prefix, np.uint16, ([*ids, end] for ids in encoded))

    return run


def measure(way: str, folder: Path, name: str, out: Path) -> None:
    """Worker: write the processor time of one way, where no other process has a part in it."""
    run = {"bare": bare, "jsonl": dmt, "documents": documents}[way](folder, name)
    out.with_suffix(".ready").touch()
    started = time.process_time()
    run()
    alone = {} if way == "documents" else {"processor_s": time.process_time() - started}
    out.write_text(json.dumps(alone))


def take_turns(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """One round: all ways, of which one at a time runs."""
    with TemporaryDirectory(dir=folder) as place, ExitStack() as ends:
        outs = {way: Path(place, f"{way}.json") for way in WAYS}
        runs = {
            way: ends.enter_context(
                Run(
                    [*WORKER, way, str(folder), name, str(out)],
                    out.with_suffix(".ready").exists,
                    out.exists,
                )
            )
            for way, out in outs.items()
        }
        running = [*runs.values()]
        while running:
            running = [run for run in running if not run.turn(TURN_S)]
        for run in runs.values():
            run.end()
        return {
            way: {"seconds": runs[way].ran_s} | json.loads(out.read_text())
            for way, out in outs.items()
        }


def tokenising(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    """Medians of all ways, and ratios of their speed within a round."""
    taken = [take_turns(folder, name) for _ in range(rounds)]

    def ratios(ours: str, other: str, what: str = "seconds") -> dict[str, Any]:
        found = [round(one[other][what] / one[ours][what], 3) for one in taken]
        return {"median": statistics.median(found), "rounds": found}

    def median(way: str, what: str) -> float:
        return round(statistics.median(one[way][what] for one in taken), 3)

    return {
        "speed_ratios": {
            "jsonl to bare": ratios("jsonl", "bare"),
            "jsonl to documents": ratios("jsonl", "documents"),
        },
        "processor_time_ratio_bare_to_jsonl": ratios("jsonl", "bare", "processor_s"),
        "medians": {way: {what: median(way, what) for what in taken[0][way]} for way in WAYS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder, options.megabytes)
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("tokenizers", "datasets")},
            "megabytes": options.megabytes,
            "bpe": tokenising(folder, str(folder / "bpe"), options.rounds),
            "bytes": tokenising(folder, "bytes", options.rounds),
        }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        measure(sys.argv[2], Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        main()
