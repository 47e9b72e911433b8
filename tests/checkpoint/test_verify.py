"""Elements that are missing, twice there or misnamed, although every hash is right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.making import saved_run
from toolkit.checkpoint import saved_state
from toolkit.checkpoint.index import INDEX
from toolkit.checkpoint.manifest import Manifest, record_of
from toolkit.checkpoint.verify import coverage_problems, verify
from toolkit.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The checkpoint with other tensors, and a manifest that agrees with them."""
    checkpoint = saved_run(folder, 5) / "checkpoints" / "step-00000005"
    state = checkpoint / "state-00000.safetensors"
    tensors = load_file(state)
    change(tensors)
    save_file(tensors, state)
    manifest = Manifest.read(checkpoint)
    files = manifest.files | {state.name: record_of(state)}
    (checkpoint / INDEX).unlink()
    del files[INDEX]  # as in release 0.1
    manifest.with_files(files).write(checkpoint)
    return checkpoint


def forget(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(key)


def add(key: str, like: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: tensors[like].clone()})


def cut_short(tensors: Tensors) -> None:
    tensors[f"weight/{NORM}[0:35]"] = torch.zeros(34)


def forget_everywhere(tensors: Tensors) -> None:
    for key in [key for key in tensors if NORM in key]:
        del tensors[key]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (forget(f"exp_avg/{NORM}[0:35]"), f"exp_avg of {NORM} lacks 35 of 64 elements"),
        (forget(f"exp_avg_sq/{NORM}[35:64]"), f"exp_avg_sq of {NORM} lacks 29 of 64 elements"),
        (forget(f"weight/{NORM}[35:64]"), f"exp_avg of {NORM} has rows (35, 64) outside"),
        (add(f"weight/{NORM}[1:36]", f"weight/{NORM}[0:35]"), "has rows (1, 36) twice"),
        (add("exp_avg/foreign[0:35]", f"weight/{NORM}[0:35]"), "exp_avg of foreign is there"),
        (add("weight/foreign[0:35]", f"weight/{NORM}[0:35]"), "exp_avg of foreign lacks 35"),
        (cut_short, f"weight/{NORM}[0:35] holds F32 [34], not what its name says"),
        (forget_everywhere, f"{NORM} should have the shape (64,), it has None"),
        (add("stranger", f"weight/{NORM}[0:35]"), "holds stranger, which is no part"),
    ],
)
def test_named(change: Callable[[Tensors], object], told: str, tmp_path: Path) -> None:
    assert told in "\n".join(verify(changed(tmp_path, change)).problems)


def test_an_index_of_other_files_is_named(tmp_path: Path) -> None:
    checkpoint = saved_run(tmp_path, 5) / "checkpoints" / "step-00000005"
    assert verify(checkpoint).problems == ()
    index = checkpoint / INDEX
    index.write_text(index.read_text().replace("[0:35]", "[0:34]"))
    manifest = Manifest.read(checkpoint)
    manifest.with_files(manifest.files | {INDEX: record_of(index)}).write(checkpoint)
    assert verify(checkpoint).problems[0] == "index.json is not the index of its files"


@pytest.mark.parametrize("name", ["../stolen", "/etc/passwd", "hf/../../stolen"])
def test_a_manifest_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = saved_run(tmp_path, 5) / "checkpoints" / "step-00000005"
    manifest = Manifest.read(folder)
    replace(manifest, files={name: next(iter(manifest.files.values()))}).write(folder)
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        Manifest.read(folder)


def test_muon_keeps_no_second_moment(tmp_path: Path) -> None:
    """Of AdamW's checkpoint, the matrices inside the layers and nothing else."""
    state = saved_state.SavedState(saved_run(tmp_path, 5) / "checkpoints" / "step-00000005")
    found = {
        problem.partition(" ")[0] for problem in coverage_problems(state, optimizer="muon")
    }
    assert found == {name for name in state.shapes if name.endswith("_proj.weight")}
