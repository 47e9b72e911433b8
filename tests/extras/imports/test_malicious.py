"""Whatever a checkpoint of another tool holds, importing it runs none of its code."""

import copyreg
import io
import os
import pickle
import re
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.making import write_recipe
from tests.checkpoint.payloads import Canary, pickled
from tests.dmt import Dmt
from tests.extras.imports.archives import HUGE, NEOX, zipped
from toolkit.extras.imports.pickles import StandIn, load_pickle


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


class Built:
    """A class that a file may name, and whose state makes the canary."""

    def __setstate__(self, state: str) -> None:
        os.system(state)


def storage(key: str) -> bytes:
    """Loads the storage of this name, of one float."""
    words = text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    return b"(" + words + b"K\x01tQ"


def tensor(sizes: bytes, strides: bytes) -> bytes:
    """A tensor of storage 0."""
    arguments = b"K\x00" + sizes + strides + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage("0") + arguments + b"tR"


def legacy_tar(command: str) -> bytes:
    """What torch 0.1 wrote."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = b"cos\nsystem\n" + text(command) + b"\x85R."
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


Trick = Callable[[str], bytes]
TRICKS: dict[str, Trick] = {
    "os.system by REDUCE": lambda do: zipped(b"\x80\x02cos\nsystem\n" + text(do) + b"\x85R."),
    "builtins.eval": lambda do: zipped(
        b"\x80\x02cbuiltins\neval\n" + text(f"__import__('os').system({do!r})") + b"\x85R."
    ),
    "INST": lambda do: zipped(b"(" + text(do) + b"ios\nsystem\n."),
    "OBJ": lambda do: zipped(b"(cos\nsystem\n" + text(do) + b"o."),
    "STACK_GLOBAL": lambda do: zipped(
        b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text(do) + b"\x85R."
    ),
    "a chain of getattr": lambda do: zipped(
        b"\x80\x02cbuiltins\ngetattr\ncbuiltins\ngetattr\nctorch\nserialization\n"
        + text("os") + b"\x86R" + text("system") + b"\x86R" + text(do) + b"\x85R."
    ),
    "__setstate__": lambda do: zipped(
        b"\x80\x02ctests.extras.imports.test_malicious\nBuilt\n)\x81" + text(do) + b"b."
    ),
    "a number of copyreg's registry": lambda do: zipped(
        b"\x80\x02\x82\x7f" + text(do) + b"\x85R."
    ),
    "a persistent id": lambda do: zipped(b"\x80\x02(" + text("module") + text(do) + b"tQ."),
    "a storage out of the archive": lambda _: zipped(b"\x80\x02" + storage("../../f") + b"."),
    "a pickle in a storage": lambda do: zipped(
        b"\x80\x02cpickle\nloads\nc_codecs\nencode\n"
        + text((b"cos\nsystem\n" + text(do) + b"\x85R.").decode("latin1"))
        + text("latin1") + b"\x86R\x85R."
    ),
    "torch's legacy tar": legacy_tar,
    "torch's legacy pickle": lambda do: pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(
        1001, 2
    ) + pickle.dumps({}, 2) + b"cos\nsystem\n" + text(do) + b"\x85R.",
    "a plain pickle": lambda do: pickled(Canary(Path(do.removeprefix("touch ").strip("'")))),
    "memory of a constructor": lambda do: zipped(
        b"\x80\x02cbuiltins\nbytearray\n" + HUGE + b"\x85R0" + text(do) + b"."
    ),
    "memory of a tensor": lambda _: zipped(
        b"\x80\x02" + tensor(HUGE + b"\x85", b"K\x01\x85") + b"."
    ),
    "memory of an archive": lambda do: zipped(
        b"\x80\x02" + text(do + " " * 10_000_000) + b".", compression=zipfile.ZIP_DEFLATED
    ),
}  # fmt: skip
MODEL = "mp_rank_00_model_states.pt"
RANK = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
PLACES = {
    "DeepSpeed's model": MODEL,
    "DeepSpeed's rank": RANK,
    "universal": "zero/model.norm.weight/fp32.pt",
    "GPT-NeoX": RANK,
}
"""A file of each format."""


@pytest.fixture
def registered() -> Iterator[None]:
    copyreg.add_extension("os", "system", 0x7F)
    yield
    copyreg.remove_extension("os", "system", 0x7F)


def write_model(folder: Path) -> None:
    """What DeepSpeed's readers open first."""
    saved: dict[str, Any] = {
        "optimizer": None, "param_shapes": [{}], "module": {}, "buffer_names": [],
        "global_steps": 1, "skipped_steps": 0, "global_samples": 1, "ds_config": {},
    }  # fmt: skip
    torch.save(saved, folder / MODEL)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("trick", "form"), [*zip(TRICKS, cycle(PLACES), strict=False)])
def test_nothing_of_it_runs(trick: str, form: str, tmp_path: Path, dmt: Dmt) -> None:
    recipe, source, canary = write_recipe(tmp_path), tmp_path / "source", tmp_path / "canary"
    (tmp_path / "a.txt").write_text("text " * 200)
    file = source / PLACES[form]
    file.parent.mkdir(parents=True)
    write_model(source)
    if form == "GPT-NeoX":
        (source / "configs").mkdir()
        recipe.write_text(re.sub(r"  config: {.*?}\n", NEOX, recipe.read_text(), flags=re.S))
    file.write_bytes(TRICKS[trick](f"touch '{canary}'"))
    printed = dmt("checkpoint", "import", recipe, source, "--run-dir", tmp_path / "run", code=2)
    assert f"{file.name} is refused: " in printed.err
    assert not canary.exists()
    assert not (tmp_path / "run").exists()


def test_they_do_run_where_pickles_are_trusted(tmp_path: Path) -> None:
    """What the test above looks for does happen to those who unpickle."""
    canary = tmp_path / "canary"
    content = TRICKS["os.system by REDUCE"](f"touch '{canary}'")
    torch.load(io.BytesIO(content), weights_only=False)
    assert canary.exists()


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, dmt: Dmt) -> None:
    outside, source = tmp_path / "outside", tmp_path / "source"
    outside.mkdir()
    source.mkdir()
    write_model(outside)
    (source / "latest").write_text("../outside")
    recipe = write_recipe(tmp_path)
    (tmp_path / "a.txt").write_text("text " * 200)
    printed = dmt("checkpoint", "import", recipe, source, code=2)
    assert "names a folder outside: '../outside'" in printed.err
    (source / "mp_rank_00_model_states.pt").symlink_to(outside / MODEL)
    printed = dmt("checkpoint", "import", recipe, source, code=2)
    assert "is refused: [Errno" in printed.err


def test_what_no_tool_wrote_is_named(tmp_path: Path, dmt: Dmt) -> None:
    source = tmp_path / "source"
    source.mkdir()
    printed = dmt("checkpoint", "import", write_recipe(tmp_path), source, code=2)
    assert f"{source} is no checkpoint of a tool that is known" in printed.err
    assert "GPT-NeoX" in printed.err and "DeepSpeed ZeRO" in printed.err


def test_a_member_of_an_enum_is_looked_up_in_nothing(tmp_path: Path) -> None:
    """As Python 3.11.2 pickles one: `getattr(Class, "name")`."""
    wanted = b"c__builtin__\ngetattr\ncargparse\nNamespace\n" + text("__init__") + b"\x86R."
    (tmp_path / "common.pt").write_bytes(zipped(b"\x80\x02" + wanted))
    with torch.serialization.safe_globals([Namespace]):  # as megatron-core does
        found = load_pickle(tmp_path, "common.pt")
        assert Namespace in torch.serialization.get_safe_globals()
    assert type(found) is StandIn and found.arguments == (StandIn, "__init__")
