"""Whatever a checkpoint of another tool holds, importing it runs none of its code."""

import copyreg
import io
import pickle
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.checkpoint.making import write_recipe
from tests.checkpoint.payloads import Canary, check_refused, pickled, zipped
from tests.dmt import Dmt
from toolkit.errors import CheckpointError
from toolkit.extras.imports.pickles import StandIn, load_pickle
from toolkit.extras.imports.torch_dist import METADATA, Reader

DATA_FILE = "__0_0.distcp"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save({"x": torch.arange(6.0)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def read(folder: Path) -> Any:
    return Reader(folder).read("x")


@pytest.mark.parametrize("form", [pickled, zipped])
def test_files_of_dcp(form: Callable[[Canary], bytes], saved: Path, tmp_path: Path) -> None:
    assert read(saved).tolist() == [*range(6)]
    content = form(Canary(tmp_path / "canary"))
    index = pickle.loads((saved / METADATA).read_bytes())
    check_refused(saved / METADATA, lambda: read(saved), content)
    for key, place in index.storage_data.items():
        index.storage_data[key] = replace(place, offset=0, length=len(content))
    (saved / METADATA).write_bytes(pickle.dumps(index))
    check_refused(saved / DATA_FILE, lambda: read(saved), content)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("form", [pickled, zipped])
def test_files_of_torch_save(form: Callable[[Canary], bytes], tmp_path: Path) -> None:
    content = form(Canary(tmp_path / "canary"))
    check_refused(tmp_path / "a.pt", lambda: load_pickle(tmp_path, "a.pt"), content)
    assert not (tmp_path / "canary").exists()
    torch.save({"x": torch.ones(3)}, tmp_path / "a.pt")
    assert load_pickle(tmp_path, "a.pt")["x"].tolist() == [1.0] * 3
    (tmp_path / "link.pt").symlink_to(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="no regular file"):
        load_pickle(tmp_path, "link.pt")


def test_objects_are_stand_ins(tmp_path: Path) -> None:
    torch.save({"x": Namespace(step=3)}, tmp_path / "a.pt")
    found = load_pickle(tmp_path, "a.pt")["x"]
    assert type(found) is StandIn and vars(found)["step"] == 3


def test_members_of_enums_by_getattr(saved: Path) -> None:
    """So Python 3.11.0 to 3.11.3 write them; nothing else may be got."""
    metadata, written = pickle.loads((saved / METADATA).read_bytes()), io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.dispatch_table = copyreg.dispatch_table | {
        _MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))
    }
    pickler.dump(metadata)
    assert b"getattr" in written.getvalue()
    (saved / METADATA).write_bytes(written.getvalue())
    assert read(saved).tolist() == [*range(6)]

    class Sly:
        def __reduce__(self) -> Any:
            return getattr, (Metadata, "__init__")

    (saved / METADATA).write_bytes(pickle.dumps(Sly()))
    with pytest.raises(CheckpointError, match="getattr, which no index needs but for an Enum"):
        read(saved)


def test_what_no_tool_wrote_is_named(tmp_path: Path, dmt: Dmt) -> None:
    source = tmp_path / "source"
    source.mkdir()
    printed = dmt("checkpoint", "import", write_recipe(tmp_path), source, code=2)
    assert f"{source} is not a checkpoint of a supported tool" in printed.err
    assert "Megatron-LM" in printed.err and "DeepSpeed universal" in printed.err
