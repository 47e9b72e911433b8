"""Text that is tokenised while it is read: one order of samples, whoever reads it and when."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.data.building import built
from tests.processes import ROOT, wait_until
from toolkit.batch import IGNORE_INDEX
from toolkit.data.batches import GlobalBatches
from toolkit.data.build import TrainingData
from toolkit.data.formats.indexed import write_indexed
from toolkit.data.streaming.ahead import AheadWorkers
from toolkit.data.streaming.place import StreamPlace
from toolkit.data.streaming.samples import OpenedWindow, StreamedSamples
from toolkit.data.streaming.source import PREPARED
from toolkit.data.streaming.streams import Streams
from toolkit.errors import DataError

LENGTH, BATCH = 16, 8
SOURCES = {"web": 60, "code": 25, "rare": 4}
"""Documents of each of two files of a source."""
SMALL = {"chunk_mib": 0.001, "shuffled_chunks": 4, "workers": 0}
"""Chunks of a KiB: a source has up to a dozen."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def write_corpus(tmp_path: Path) -> Path:
    chance, folder = random.Random(5), tmp_path / "corpus"
    folder.mkdir()
    for name, documents in SOURCES.items():
        for file in "01":
            with (folder / f"{name}-{file}.jsonl").open("w") as out:
                for number in range(documents):
                    noise = chance.getrandbits(chance.randint(1, 600))
                    text = f"{name} {file} {number}: {noise:x}"
                    out.write(json.dumps({"text": text, "id": number}) + "\n")
    return folder


def build(corpus: Path, **data: Any) -> TrainingData:
    section = {"train": {"kind": "hf", "path": "web-*.jsonl"}, "streaming": SMALL} | data
    return built(corpus, {"cache": "cache", **section}, LENGTH, BATCH, seed=3)


def blend(corpus: Path, **data: Any) -> TrainingData:
    weights = {"web": 0.6, "code": 0.3, "rare": 0.1}
    train = [
        {"kind": "hf", "path": f"{name}-*.jsonl", "label": name, "weight": weight}
        for name, weight in weights.items()
    ]
    documents = ([number] * (LENGTH + number) for number in range(30))
    write_indexed(corpus / "math", np.uint16, documents)
    train.append({"kind": "megatron", "prefix": "math", "label": "math", "weight": 0.2})
    stages = [{"from_step": 9, "weights": {"web": 0.1, "code": 0.5, "rare": 0.4, "math": 0}}]
    return build(corpus, train=train, stages=stages, **data)


def rows(data: TrainingData, start: int, count: int) -> Iterator[bytes]:
    for index in data.order.indices(start, count).tolist():
        (row,) = data.train.rows(index)
        yield row.input_ids.tobytes() + row.labels.tobytes()


def stream_of(data: TrainingData) -> StreamedSamples:
    assert isinstance(data.train, StreamedSamples)
    return data.train


def streams_of(data: TrainingData) -> Streams:
    assert data.streams is not None
    return data.streams


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_every_sample_once_a_pass(corpus: Path, packing: str) -> None:
    data = build(corpus, packing=packing)
    stream = stream_of(data)
    chunks = list(stream.every_chunk())
    assert len(chunks) > 8
    every = Counter(
        row.input_ids.tobytes() + row.labels.tobytes()
        for chunk in chunks
        for number in range(len(chunk))
        for row in chunk.rows(number)
    )
    size = every.total()
    passes = [list(rows(data, number * size, size)) for number in range(3)]
    assert [Counter(one) for one in passes] == [every] * 3
    assert passes[0] != passes[1] != passes[2]
    if packing == "best_fit":  # which drops nothing
        labels = [row.labels for one in chunks for n in range(len(one)) for row in one.rows(n)]
        trained = sum(one.n_tokens - one.n_documents for one in chunks)
        assert sum((row != IGNORE_INDEX).sum() for row in labels) == trained


def test_a_single_chunk_is_shuffled_again_in_every_pass(corpus: Path) -> None:
    data = build(corpus, streaming={"chunk_mib": 1})
    (chunk,) = stream_of(data).every_chunk()
    unshuffled = [chunk.rows(number)[0] for number in range(len(chunk))]
    cut = [row.input_ids.tobytes() + row.labels.tobytes() for row in unshuffled]
    first, second = (list(rows(data, number * len(cut), len(cut))) for number in range(2))
    assert sorted(first) == sorted(second) == sorted(cut)
    assert first != second and cut not in (first, second)


def test_documents_are_those_of_the_files(corpus: Path) -> None:
    """The tokens of all chunks are the bytes of all texts, in order."""
    stream = stream_of(build(corpus))
    tokens = np.concatenate(
        [chunk.stream.read(0, len(chunk.stream))[0] for chunk in stream.every_chunk()]
    )
    expected = b""
    for file in "01":
        for line in (corpus / f"web-{file}.jsonl").read_text().splitlines():
            expected += json.loads(line)["text"].encode() + b"\x00"
    assert bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)) == expected


def test_windows_mix_chunks_from_all_over(corpus: Path) -> None:
    data, found = build(corpus), list[OpenedWindow]()
    streams_of(data).report(found.append)
    stream = stream_of(data)
    total = sum(map(len, stream.every_chunk()))
    list(rows(data, 0, total + 1))
    n_chunks = len(stream.source.chunks)
    first = [window for window in found if window.epoch == 0]
    sizes = [window.chunks for window in first]
    assert sizes[:3] == [1, 2, 4] and sum(sizes) == n_chunks and max(sizes) == 4
    assert sum(window.samples for window in first) == total
    dropped = sum(window.dropped_tokens for window in first)
    tokens = sum(chunk.n_tokens for chunk in stream.every_chunk())
    assert tokens == total * LENGTH + dropped
    assert found[-1].epoch == 1


@pytest.mark.parametrize("make", [build, blend])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_layout_and_restart_gets_the_same_samples(
    corpus: Path, make: Any, world: int
) -> None:
    """On the fly, prepared, resumed with an empty cache and by every number of ranks."""
    steps, expected = 40, list(rows(make(corpus), 0, 40 * BATCH))
    for resumed in (0, 5, 23, 39):
        for micro in {1, BATCH // world}:
            data = resumed_at(corpus, make, resumed * BATCH, f"cache-{world}-{resumed}-{micro}")
            batches = [GlobalBatches(data.train, data.order, BATCH) for _ in range(world)]
            found = []
            for step in range(resumed, steps):
                for rank in range(world):
                    share = batches[rank].micro_batches(step * BATCH, rank, [micro] * world)
                    for batch in share:
                        pairs = zip(batch.input_ids, batch.labels, strict=True)
                        found += [a.numpy().tobytes() + b.numpy().tobytes() for a, b in pairs]
            assert found == expected[resumed * BATCH :]


def resumed_at(corpus: Path, make: Any, samples: int, cache: str) -> TrainingData:
    """The data of a process that continues, with nothing in its cache, from a checkpoint."""
    before = make(corpus)
    for _ in rows(before, 0, samples + BATCH):  # the next batch was prefetched
        pass
    saved = json.loads(
        json.dumps([place and asdict(place) for place in before.places_at(samples)])
    )
    after = make(corpus, cache=cache)
    assert after.fingerprint_at(samples) == before.fingerprint_at(samples)
    streams_of(after).continue_at([place and StreamPlace(**place) for place in saved])
    streams_of(after).open(samples, BATCH)
    return after


def test_resuming_takes_what_is_near_only(corpus: Path) -> None:
    """Whatever came before: one window, not all of them."""
    data = resumed_at(corpus, build, 30 * 300, "empty")
    place = stream_of(data).place_at(30 * 300)
    assert place.epoch > 3
    made = list((corpus / "empty").rglob("*.idx"))
    assert len(made) <= 4
    for _ in rows(data, 30 * 300, BATCH):
        pass


@pytest.mark.parametrize("workers", [1, 4])
def test_prepared_by_other_processes(corpus: Path, workers: int) -> None:
    """The same samples, and all chunks are made once by whoever comes first."""
    expected = list(rows(build(corpus), 0, 400))
    data = build(corpus, cache="other", streaming=SMALL | {"ahead": 50})
    streams = streams_of(data)
    total = len(stream_of(data).source.chunks)
    with AheadWorkers(streams.sources, workers, streams.advance):
        wait_until(lambda: len(list((corpus / "other").rglob("*.idx"))) == total, "all chunks")
        made = {path: path.stat().st_mtime_ns for path in (corpus / "other").rglob("*.idx")}
        assert list(rows(data, 0, 400)) == expected
        assert {path: path.stat().st_mtime_ns for path in made} == made
    assert not list((corpus / "other").rglob("*.tmp"))


def test_files_behind_urls(corpus: Path) -> None:
    """Also in other processes; the samples are those of the same files on this machine."""
    expected = list(rows(build(corpus), 0, 400))
    train = {"kind": "hf", "path": f"file://{corpus}/web-*.jsonl"}
    data = build(corpus, train=train, streaming=SMALL | {"ahead": 50}, cache="other")
    streams, total = streams_of(data), len(stream_of(data).source.chunks)
    with AheadWorkers(streams.sources, 1, streams.advance):
        wait_until(lambda: len(list((corpus / "other").rglob("*.idx"))) == total, "all chunks")
    assert list(rows(data, 0, 400)) == expected


def test_a_tokenising_process_that_is_killed_is_replaced(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streams = streams_of(build(corpus))

    def mine() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                found += [child] * ("toolkit.data.streaming.ahead" in child.cmdline())
        return found

    with AheadWorkers(streams.sources, 1, streams.advance) as ahead:
        wait_until(mine, "a process")
        (first,) = mine()
        first.kill()
        wait_until(lambda: first not in mine(), "its end")
        # A killed process leaves the list before it can be reaped: ask again, as training does.
        wait_until(lambda: ahead.want() or mine(), "another one")
        wait_until(lambda: list((corpus / "cache").rglob("*.idx")), "a chunk")
    assert not mine()
    assert "started again" in caplog.text


RUN = """
import sys
from pathlib import Path
from tests.data.test_streaming import build, streams_of
from toolkit.data.streaming.ahead import AheadWorkers
streams = streams_of(build(Path(sys.argv[1])))
with AheadWorkers(streams.sources, 2, streams.advance):
    input()
"""


@pytest.mark.slow
def test_tokenising_processes_die_with_the_run(corpus: Path) -> None:
    """Killed by SIGKILL, also while one of them is at work. None uses shared memory."""
    for delay in (0.0, 0.5, 1.0):
        shutil.rmtree(corpus / "cache", ignore_errors=True)
        run = subprocess.Popen(
            [sys.executable, "-c", RUN, str(corpus)], stdin=subprocess.PIPE, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        process = psutil.Process(run.pid)
        wait_until(lambda p=process: len(p.children()) == 2, "two processes")
        children = process.children()
        time.sleep(delay)
        shared = [one.path for child in children for one in child.memory_maps()]
        assert not [path for path in shared if path.startswith("/dev/shm")]
        run.kill()
        run.communicate()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_chunks_behind_are_removed(corpus: Path) -> None:
    """Beyond the limit; what was prepared stays."""
    data = build(corpus, streaming=SMALL | {"keep_gib": 1e-5, "shuffled_chunks": 2, "ahead": 1})
    streams, expected = (
        streams_of(data),
        list(
            rows(build(corpus, cache="other", streaming=SMALL | {"shuffled_chunks": 2}), 0, 900)
        ),
    )
    folder = stream_of(data).source.folder

    def nbytes() -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    streams.report(lambda _: streams.advance())
    most, found = 0, []
    for row in rows(data, 0, 900):
        found.append(row)
        most = max(most, nbytes())
    assert found == expected
    everything = nbytes_of_all(corpus / "other")
    assert most < everything / 2
    (folder / PREPARED).touch()
    list(stream_of(data).every_chunk())
    before = nbytes()
    streams.advance()
    assert nbytes() == before


def nbytes_of_all(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_urgent_comes_first(corpus: Path) -> None:
    streams = streams_of(blend(corpus, streaming=SMALL | {"ahead": 3}))
    wanted = streams.advance()
    assert {source for source, _ in wanted} == {0, 1, 2}
    assert [source for source, _ in wanted[:3]] == [0, 1, 2]
    assert len(set(wanted)) == len(wanted)


def test_too_little_text(corpus: Path) -> None:
    (corpus / "tiny.jsonl").write_text('{"text": "a"}\n' * 3)
    data = build(corpus, train={"kind": "hf", "path": "tiny.jsonl"})
    with pytest.raises(DataError, match=r"`tiny.jsonl` has no sample of 16 tokens"):
        data.train.rows(0)


def test_another_listing_is_other_data(corpus: Path) -> None:
    before = build(corpus)
    assert build(corpus, cache="other").fingerprint == before.fingerprint
    for changed in (
        {"streaming": SMALL | {"chunk_mib": 0.002}},
        {"streaming": SMALL | {"shuffled_chunks": 8}},
        {"special_tokens": "parse"},
        {"packing": "best_fit"},
        {"isolate_documents": True},
    ):
        assert build(corpus, **changed).fingerprint != before.fingerprint
    same = {"streaming": SMALL | {"ahead": 9, "workers": 2, "keep_gib": 1.0}}
    assert build(corpus, **same).fingerprint == before.fingerprint
    os.utime(corpus / "web-0.jsonl", ns=(0, 1))
    assert build(corpus).fingerprint != before.fingerprint


def test_the_first_sample_of_many_files(tmp_path: Path) -> None:
    """One of 10,000 files; the other 39 GB are neither read nor tokenised."""
    (tmp_path / "files").mkdir()
    line = json.dumps({"text": "some words " * 90}) + "\n"
    (tmp_path / "files" / "0.jsonl").write_text(line * (4 * 2**20 // len(line)))
    for number in range(1, 10_000):
        os.link(tmp_path / "files/0.jsonl", tmp_path / f"files/{number}.jsonl")
    train = {"kind": "hf", "path": "files/*.jsonl"}
    data = build(tmp_path, train=train, streaming={"chunk_mib": 1})
    streams_of(data).open(0, BATCH)
    assert len(stream_of(data).source.chunks) == 4 * 10_000
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
