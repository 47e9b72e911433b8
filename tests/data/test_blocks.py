"""Blocks of remote files: right whatever is killed, damaged or removed, and bounded."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.data.building import built
from toolkit.data.batches import GlobalBatches
from toolkit.data.formats.files import ListedFile
from toolkit.data.remote import blocks
from toolkit.data.remote.blocks import BLOCK_BYTES, BlockCache
from toolkit.data.remote.store import RemoteFile, list_files

SIZE = 5 * BLOCK_BYTES + 1234


@pytest.fixture
def content() -> bytes:
    return random.Random(3).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> RemoteFile:
    (tmp_path / "remote").write_bytes(content)
    (found,) = list_files(f"file://{tmp_path}/remote")
    return found


def kept(cache: BlockCache) -> list[Path]:
    return sorted(path for path in cache.folder.glob("*/*") if path.is_file())


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "blocks", 2**30)


def test_any_range_is_the_files(cache: BlockCache, file: RemoteFile, content: bytes) -> None:
    edges = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, SIZE - 1, SIZE]
    for start in edges:
        for stop in edges:
            if start <= stop:
                assert cache.read(file, start, stop) == content[start:stop]


def test_a_kept_block_is_not_fetched(
    cache: BlockCache, file: RemoteFile, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    read_range = blocks.read_range

    def counting(file: RemoteFile, start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return read_range(file, start, stop)

    monkeypatch.setattr(blocks, "read_range", counting)
    cache.read(file, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 10)
    assert cache.read(file, 0, SIZE) == content
    assert cache.read(file, 0, SIZE) == content
    assert asked == [
        (2 * BLOCK_BYTES, 3 * BLOCK_BYTES),
        (0, 2 * BLOCK_BYTES),
        (3 * BLOCK_BYTES, SIZE),
    ]
    assert len(kept(cache)) == 6


def test_a_stream_reads_and_seeks(tmp_path: Path) -> None:
    lines = [b"line %d\n" % number for number in range(200_000)]
    (tmp_path / "lines").write_bytes(b"".join(lines))
    (file,) = list_files(f"file://{tmp_path}/lines")
    with ListedFile.stored(file).open() as stream:
        assert list(stream) == lines
        stream.seek(len(lines[0]) * 3)
        assert stream.readline() == lines[3]
        stream.seek(-len(lines[-1]), os.SEEK_END)
        assert stream.read() == lines[-1]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_block_is_fetched_again(
    cache: BlockCache,
    file: RemoteFile,
    content: bytes,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.read(file, 0, SIZE)
    path = kept(cache)[1]
    held = bytearray(path.read_bytes())
    held[100] ^= 1
    path.write_bytes({"cut": held[:-1], "empty": b"", "flipped": held}[damage])
    assert cache.read(file, 0, SIZE) == content
    assert str(path) in caplog.text
    caplog.clear()
    assert cache.read(file, 0, SIZE) == content
    assert not caplog.text


def test_the_oldest_blocks_make_room(tmp_path: Path, file: RemoteFile, content: bytes) -> None:
    cache = BlockCache(tmp_path / "blocks", 3 * BLOCK_BYTES)
    left_by_a_kill = cache.folder / file.identity / "0.1.2.tmp"
    left_by_a_kill.parent.mkdir(parents=True)
    left_by_a_kill.write_bytes(b"x" * 100)
    os.utime(left_by_a_kill, (1, 1))
    for start in range(0, SIZE, BLOCK_BYTES):
        assert cache.read(file, start, start + 10) == content[start : start + 10]
        assert sum(path.stat().st_size for path in kept(cache)) <= 3 * BLOCK_BYTES
        time.sleep(0.01)
    assert not left_by_a_kill.exists()
    assert [path.name for path in kept(cache)][-1] == "5"
    assert cache.read(file, 0, SIZE) == content


def test_a_full_disk_costs_only_the_cache(
    tmp_path: Path, file: RemoteFile, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocks").write_text("a file where the folder should be")
    cache = BlockCache(tmp_path / "blocks", 2**30)
    assert cache.read(file, 0, SIZE) == content
    assert cache.read(file, 0, SIZE) == content
    assert caplog.text.count("cannot write to the data cache") == 1


READER = """
import random, sys
from pathlib import Path
from toolkit.data.remote.blocks import BLOCK_BYTES, BlockCache
from toolkit.data.remote.store import list_files
remote, folder, seed = sys.argv[1:]
(file,) = list_files(remote)
content = Path(remote.removeprefix("file://")).read_bytes()
cache, rng = BlockCache(Path(folder), 4 * BLOCK_BYTES), random.Random(int(seed))
print("reading", flush=True)
for _ in range(400):
    start = rng.randrange(file.size)
    stop = min(file.size, start + rng.randrange(3 * BLOCK_BYTES))
    assert cache.read(file, start, stop) == content[start:stop]
print("right", flush=True)
"""


def test_processes_share_it_and_are_killed(tmp_path: Path, file: RemoteFile) -> None:
    def reader(seed: int) -> subprocess.Popen[str]:
        arguments = [f"file://{tmp_path}/remote", str(tmp_path / "blocks"), str(seed)]
        return subprocess.Popen(
            [sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True
        )

    whole = [reader(seed) for seed in range(2)]
    for seed in range(10, 14):
        victim = reader(seed)
        assert victim.stdout is not None and victim.stdout.readline()
        time.sleep(0.05)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    for process in whole:
        assert process.communicate()[0].splitlines() == ["reading", "right"]
        assert process.returncode == 0
    bound = BlockCache(tmp_path / "blocks", 4 * BLOCK_BYTES)
    bound.read(file, 0, 10)
    assert sum(path.stat().st_size for path in kept(bound)) <= 6 * BLOCK_BYTES


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parents(
    cache: BlockCache, file: RemoteFile, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    read_range = blocks.read_range

    def waiting(file: RemoteFile, start: int, stop: int) -> bytes:
        let_go.wait(60)
        return read_range(file, start, stop)

    monkeypatch.setattr(blocks, "read_range", waiting)
    cache.expect(file, 0, SIZE)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(blocks, "read_range", read_range)
        cache.expect(file, 0, 10)
        os._exit(0 if cache.read(file, 0, SIZE) == content else 1)
    assert os.waitpid(child, 0)[1] == 0
    let_go.set()
    assert cache.read(file, 0, SIZE) == content


def test_a_changed_file_has_other_blocks(cache: BlockCache) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/changing/file", b"old")
    (old,) = list_files("memory://changing/*")
    assert cache.read(old, 0, 3) == b"old"
    store.pipe("/changing/file", b"new")
    (new,) = list_files("memory://changing/*")
    assert cache.read(new, 0, 3) == b"new"


def test_a_terabyte_begins_soon(tmp_path: Path) -> None:
    """2**39 tokens: batches from the middle of a shuffled pass, of a million documents."""
    size, n_documents = 2**40, 2**20
    with (tmp_path / "tokens.bin").open("wb") as stream:
        stream.truncate(size)
    length = size // 2 // n_documents
    with (tmp_path / "tokens.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n_documents, n_documents + 1))
        np.full(n_documents, length, np.int32).tofile(stream)
        (np.arange(n_documents, dtype=np.int64) * length * 2).tofile(stream)
        np.arange(n_documents + 1, dtype=np.int64).tofile(stream)
    train = {"kind": "megatron", "prefix": f"file://{tmp_path}/tokens"}
    started = time.monotonic()
    data = built(tmp_path, {"train": train, "cache": "cache"}, 4096, 256)
    batches = GlobalBatches(data.train, data.order, 256)
    (batch,) = batches.micro_batches(2**26, 3, [64] * 4)
    assert time.monotonic() - started < 100  # hours where it grows with the tokens
    assert batch.input_ids.shape == (64, 4096)
    assert len(data.train) == (2**39 - 1) // 4096
    # Of this batch and the next, at most two blocks for each sample.
    assert len(kept(BlockCache(tmp_path / "cache/remote/blocks", 1))) <= 2 * 2 * 64
