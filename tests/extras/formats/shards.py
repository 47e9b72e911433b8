"""Writes MDS shards as the format is documented, to read them and to spoil them.

mosaicml-streaming 0.13 reads these shards with the same values, and its MDSWriter writes the
same bytes (of compressed shards: the same content).
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

Row = Mapping[str, str | bytes | int]
SIZES = {"int": 8, "uint16": 2}
HASHES: dict[str, Callable[[bytes], Any]] = {"sha1": hashlib.sha1, "xxh64": xxhash.xxh64}


def compress(kind: str, content: bytes) -> bytes:
    if kind == "zstd":
        import zstandard

        return bytes(zstandard.compress(content))
    import bz2
    import gzip

    return gzip.compress(content) if kind == "gz" else bz2.compress(content)


def shard_bytes(
    rows: Sequence[Row], columns: Mapping[str, str], config: Mapping[str, Any]
) -> bytes:
    """The content of a shard; the columns are in alphabetic order."""
    documents = []
    for row in rows:
        lengths, values = b"", b""
        for name in sorted(columns):
            value = row[name]
            if isinstance(value, int):
                value = value.to_bytes(SIZES[columns[name]], "little", signed=True)
            elif isinstance(value, str):
                value = value.encode()
            if columns[name] not in SIZES:
                lengths += struct.pack("<I", len(value))
            values += value
        documents.append(lengths + values)
    head = json.dumps(config, sort_keys=True).encode()
    at = 4 + 4 * (len(rows) + 1) + len(head)
    places = [at]
    for document in documents:
        places.append(places[-1] + len(document))
    count = struct.pack("<I", len(rows))
    return count + struct.pack(f"<{len(places)}I", *places) + head + b"".join(documents)


def write_mds(
    folder: Path,
    *shards: Sequence[Row],
    columns: Mapping[str, str],
    compression: str | None = None,
    hashes: Sequence[str] = ("sha1", "xxh64"),
) -> None:
    """A folder with a file of each shard, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    config = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": list(hashes),
        "size_limit": 1 << 26,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [SIZES.get(columns[name]) for name in names],
    }

    def listed(name: str, content: bytes) -> dict[str, Any]:
        digests = {name: HASHES[name](content).hexdigest() for name in hashes}
        return {"basename": name, "bytes": len(content), "hashes": digests}

    index = []
    for number, rows in enumerate(shards):
        content, name = shard_bytes(rows, columns, config), f"shard.{number:05}.mds"
        files = {"raw_data": listed(name, content), "zip_data": None}
        if compression is not None:
            kind = compression.partition(":")[0]
            content, name = compress(kind, content), f"{name}.{kind}"
            files["zip_data"] = listed(name, content)
        (folder / name).write_bytes(content)
        index.append({**config, **files, "samples": len(rows)})
    text = json.dumps({"version": 2, "shards": index}, sort_keys=True)
    (folder / "index.json").write_text(text)
