"""`dmt checkpoint` as a user and as a program reads it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint.conftest import single_rank  # noqa: F401 - a fixture
from tests.checkpoint.making import saved_run
from toolkit.checkpoint.resume import find_newest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_block
from toolkit.checkpoint.store import CheckpointStore
from toolkit.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, capsys: Captured) -> Path:
    made = saved_run(tmp_path, 5, 10)
    capsys.readouterr()
    return made


def dmt(capsys: Captured, *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    return code, *capsys.readouterr()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def damage(run: Path) -> None:
    """One of every kind."""
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-00000005", folder / "step-00000012.tmp")
    shutil.copytree(folder / "step-00000005", folder / "step-00000013")
    (folder / "step-00000013" / "manifest.json").write_text('{"step": 13}')
    (folder / "step-00000005" / "hf" / "tokenizer.json").unlink()


def test_list_shows_all_and_what_each_is(run: Path, capsys: Captured) -> None:
    damage(run)
    code, out, err = dmt(capsys, "list", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "step", "5", "10", "12.tmp", "13",
    ]  # fmt: skip
    assert lines[1].endswith("damaged           ddp dp1  hf/tokenizer.json is missing")
    assert lines[2].endswith("finished, latest  ddp dp1")
    assert "left by a save that was interrupted" in lines[3]
    assert "states no format, this release reads 1" in lines[4]
    assert dmt(capsys, "list", run / "checkpoints") == (code, out, err)


def test_list_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from toolkit.cli.main import main\n"
        f"main(['checkpoint', 'list', {str(run)!r}])\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_verify_names_every_problem(run: Path, capsys: Captured) -> None:
    code, out, err = dmt(capsys, "verify", run)
    assert code == 0 and "step-00000010 is the newest finished checkpoint" in err
    assert "is whole: 6 files" in out
    folder = run / "checkpoints" / "step-00000010"
    (folder / "notes.txt").write_text("mine")
    assert dmt(capsys, "verify", folder)[0] == 0
    flip(folder / "state-00000.safetensors")
    (folder / "hf" / "config.json").unlink()
    shutil.copy(folder / "state-00000.safetensors", folder / "state-00007.safetensors")
    code, out, err = dmt(capsys, "verify", folder)
    assert code == 2
    assert err.splitlines() == [
        "note: notes.txt is not a file of this checkpoint: it is never read",
        "note: state-00007.safetensors is not a file of this checkpoint: it is never read",
        "✗ hf/config.json is missing",
        "✗ state-00000.safetensors was changed: its SHA-256 is not the one in manifest.json",
        f"{folder} is damaged: 2 problems",
    ]


def test_damage_does_not_become_part_of_a_good_checkpoint(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    flip(run / "checkpoints" / "step-00000010" / "state-00000.safetensors")
    code, _, err = dmt(capsys, "export", run, tmp_path / "out")
    assert code == 2 and "state-00000.safetensors was changed" in err
    assert not (tmp_path / "out").exists()


def test_export(run: Path, tmp_path: Path, capsys: Captured) -> None:
    code, out, err = dmt(capsys, "export", run, tmp_path / "model")
    assert code == 0 and "verifying the checkpoint first" in err and "wrote" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = SavedState(run / "checkpoints" / "step-00000010")
    norm = saved.read("weight", whole_block("model.norm.weight", (64,)))
    assert torch.equal(model.model.norm.weight, norm)
    code, out, err = dmt(capsys, "export", run, tmp_path / "m2", "--no-verify")
    assert code == 0 and "verifying" not in err
    code, _, err = dmt(capsys, "export", run, tmp_path / "model")
    assert code == 2 and "exists and is no empty folder" in err


def test_a_renamed_folder_is_damaged(run: Path, tmp_path: Path, capsys: Captured) -> None:
    renamed = run / "checkpoints" / "step-00000020"
    renamed.with_name("step-00000005").rename(renamed)
    listed = dmt(capsys, "list", run)[1]
    code, _, err = dmt(capsys, "verify", run)
    assert code == 2 and "step-00000020 is the newest" in err
    for printed in (listed, err, dmt(capsys, "export", run, tmp_path / "model")[2]):
        assert "it is the checkpoint of step 5: rename it to step-00000005" in printed


def test_a_mistake_is_one_message(run: Path, tmp_path: Path, capsys: Captured) -> None:
    damage(run)
    folder = run / "checkpoints"
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["verify", tmp_path / "nowhere"], "does not exist"),
        (["verify", tmp_path / "empty"], "neither a run directory nor a checkpoint"),
        (["list", tmp_path / "empty"], "neither a run directory nor a checkpoint"),
        (["verify", folder / "step-00000012.tmp"], "neither a run directory nor a checkpoint"),
        (["verify", folder / "step-00000013"], "states no format"),
    ):
        code, out, err = dmt(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("dmt: ") and words in err and "Traceback" not in err


def link_out(path: Path) -> None:
    """The file itself, outside of the checkpoint."""
    path.symlink_to(path.rename(path.parent.parent.parent / "outside"))


@pytest.mark.parametrize("name", ["state-00000.safetensors", "manifest.json", "hf/config.json"])
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), link_out],
    ids=["FIFO", "device", "link"],
)
def test_only_regular_files_inside_the_checkpoint_are_opened(
    run: Path,
    tmp_path: Path,
    capsys: Captured,
    name: str,
    put: Callable[[Path], None],
) -> None:
    """Before, a FIFO and a device were read for ever, and a link out was followed."""
    folder = run / "checkpoints" / "step-00000010"
    if put is not link_out:
        (folder / name).unlink()
    put(folder / name)
    words = [["export", tmp_path / "b", *more] for more in ([], ["--no-verify"])]
    for verb, *more in (["verify"], *words):
        code, _, err = dmt(capsys, verb, folder, *more)
        assert code == 2 and name in err and ("regular file" in err or "link" in err), err
    found = find_newest(CheckpointStore(folder.parent, keep=1), expected=True)
    assert found is not None and found.manifest.step == 5


def test_a_linked_folder_inside_a_checkpoint_is_refused(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = run / "checkpoints" / "step-00000010"
    (folder / "hf").rename(tmp_path / "elsewhere")
    (folder / "hf").symlink_to(tmp_path / "elsewhere")
    code, _, err = dmt(capsys, "export", folder, tmp_path / "out", "--no-verify")
    assert code == 2 and "a link leads to it" in err
    # The checkpoint itself may lie elsewhere.
    (folder.with_name("step-00000005")).rename(tmp_path / "five")
    (run / "five").symlink_to(tmp_path / "five")
    assert dmt(capsys, "verify", run / "five")[0] == 0
