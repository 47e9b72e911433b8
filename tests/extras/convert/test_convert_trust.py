"""Megatron checkpoints whose files would run code, or are nested too deeply."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.making import MODEL
from tests.checkpoint.payloads import Canary, check_refused, nested, pickled, zipped
from tests.models.small import filled
from toolkit.cli.main import main
from toolkit.errors import DataError
from toolkit.extras.convert.torch_dist import Reader, Writer


def a_torch_dist(folder: Path) -> Callable[[], Any]:
    with Writer(folder / "dist") as writer:
        writer.add("w", (2, 2), (0, 0), torch.ones(2, 2))
        writer.finish({})
    return lambda: Reader(folder / "dist").read("w", (0, 0), (2, 2))


def torch_dist_metadata(folder: Path) -> tuple[Path, Callable[[], Any]]:
    return folder / "dist" / ".metadata", a_torch_dist(folder)


def torch_dist_data(folder: Path) -> tuple[Path, Callable[[], Any]]:
    return folder / "dist" / "__0_0.distcp", a_torch_dist(folder)


def megatron_config(folder: Path) -> tuple[Path, Callable[[], Any]]:
    """Of a Megatron checkpoint: what `dmt convert` opens first."""
    a_torch_dist(folder)
    path = folder / "dist" / "metadata.json"
    return path, lambda: _convert(folder / "dist", folder / "out")


def _convert(src: Path, dst: Path) -> None:
    if main(["convert", str(src), str(dst)]) == 2:
        raise DataError("refused")


@pytest.mark.parametrize("form", [pickled, zipped])
@pytest.mark.parametrize("case", [torch_dist_metadata, torch_dist_data, megatron_config])
def test_refused(
    case: Callable[[Path], tuple[Path, Callable[[], Any]]],
    form: Callable[[Canary], bytes],
    tmp_path: Path,
) -> None:
    file, load = case(tmp_path)
    if case is not megatron_config:
        load()  # what is refused afterwards is the payload
    check_refused(file, load, form(Canary(tmp_path / "canary")))
    assert not (tmp_path / "canary").exists()
    check_refused(file, load, nested(100_000).encode())


@pytest.mark.slow
def test_objects_of_a_megatron_checkpoint_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dmt convert --verify` lets megatron-core load; it would unpickle extra states."""
    filled(MODEL).save_pretrained(tmp_path / "model")
    plain = Writer._write

    def tampered(self: Writer, index: Any, value: object) -> None:
        plain(self, index, Canary(tmp_path / "canary") if value == [None] else value)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_write", tampered)
        assert main(["convert", str(tmp_path / "model"), str(tmp_path / "megatron")]) == 0
    assert b"touch" in (tmp_path / "megatron/release/__0_0.distcp").read_bytes()
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "b"), "--verify"]) == 0
    assert not (tmp_path / "canary").exists()
