"""From a recipe's data section to packed samples."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.building import built
from toolkit.data.build import TrainingData
from toolkit.data.packing import StreamSamples
from toolkit.errors import DataError

N_DOCUMENTS = 12


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for i in range(N_DOCUMENTS):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 10)
    (tmp_path / "00empty.txt").touch()
    (tmp_path / "validation.md").write_text("#" * 20)
    return tmp_path


def build(base: Path, data: dict[str, Any] | None = None, **settings: Any) -> TrainingData:
    section = {"train": {"kind": "text", "files": ["*.txt"]}, **(data or {})}
    return built(base, section, **{"length": 4, "batch": 4, **settings})


def letters(samples: StreamSamples) -> set[str]:
    stream = samples.stream
    tokens, _ = stream.read(0, len(stream))
    return set(bytes(tokens[tokens < 256].tolist()).decode())


def test_no_document_is_on_both_sides(base: Path) -> None:
    data = build(base, {"validation_fraction": 0.25})
    (held_out,) = data.validation.values()
    train, validation = letters(data.sources[0].train), letters(held_out)
    assert (len(train), len(validation)) == (9, 3)
    assert not train & validation
    assert len(data.sources[0].train.stream) + len(held_out.stream) == N_DOCUMENTS * 11
    again = build(base, {"validation_fraction": 0.25})
    assert letters(*again.validation.values()) == validation
    seeds = [build(base, {"validation_fraction": 0.25}, seed=s).validation for s in range(5)]
    assert len({frozenset(letters(*one.values())) for one in seeds}) > 1


def test_fingerprint_follows_all_that_a_cursor_depends_on(base: Path) -> None:
    validation = {"validation": {"kind": "text", "files": ["validation.md"]}}
    variants = [
        build(base),
        build(base, length=5),
        build(base, {"validation_fraction": 0.25}),
        build(base, {"validation_fraction": 0.25}, seed=2),
        build(base, {"validation_fraction": 0.3}),
        build(base, {"isolate_documents": True}),
        build(base, {"packing": "best_fit"}),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    # A source of validation is not part of it.
    same, other = build(base), build(base, validation)
    assert variants[0].fingerprint == same.fingerprint == other.fingerprint
    assert other.whole_fingerprint != same.whole_fingerprint


@pytest.mark.parametrize(
    ("data", "settings", "says"),
    [
        ({}, {"vocab_size": 256}, "has 257 tokens; the model's vocabulary has 256"),
        ({}, {"batch": 33}, r"132 tokens.* 32 samples.* needed: 33 \(133 tokens\)"),
        ({}, {"length": 200}, "make 0 samples"),
        (
            {"validation": {"kind": "text", "files": ["validation.md"]}},
            {"length": 21},
            "the validation data of `validation.md` has 21 tokens",
        ),
        (
            {"train": {"kind": "text", "files": ["00.txt"]}, "validation_fraction": 0.5},
            {},
            "training data has only 1",
        ),
    ],
)
def test_mistakes(base: Path, data: Any, settings: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as raised:
        build(base, data, **settings)
    assert raised.value.fix
