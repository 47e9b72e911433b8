"""`dmt checkpoint` as a user and as a program reads it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.conftest import single_rank  # noqa: F401 - a fixture
from tests.checkpoint.making import saved_run
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import find_newest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import QUANTITIES, whole_block
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
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "step", "5", "10", "12.tmp", "13",
    ]  # fmt: skip
    assert lines[1].endswith("damaged           ddp dp1")
    assert lines[2] == "    hf/tokenizer.json is missing"
    assert "finished, latest  ddp dp1" in lines[3]
    assert "left by a save that was interrupted" in lines[5]
    assert "states no format, this release reads 1" in lines[7]
    code, out, _ = dmt(capsys, "list", run / "checkpoints", "--json")
    found = json.loads(out)["checkpoints"]
    assert [one["state"] for one in found] == ["damaged", "finished", "unfinished", "damaged"]
    assert [one["latest"] for one in found] == [False, True, False, False]
    assert found[1]["layout"]["dp"] == 1


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
    code, out, _ = dmt(capsys, "verify", folder, "--json")
    assert code == 2 and len(json.loads(out)["problems"]) == 2


def test_inspect(run: Path, capsys: Captured) -> None:
    code, out, _ = dmt(capsys, "inspect", run, "--tensors")
    assert code == 0
    for text in (
        "recipe       small", "step         10", "40 samples of 16, 500 trained tokens",
        "ddp dp1, micro batch", "fp32; weights and moments in fp32", "torch 2.13.0",
    ):  # fmt: skip
        assert text in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  model.")}
    assert lines["model.embed_tokens.weight"].split()[1:] == ["[320,", "64]", "4"]
    assert lines["model.norm.weight"].split()[1:] == ["[64]", "2"]
    said = json.loads(dmt(capsys, "inspect", run, "--json", "--tensors")[1])
    assert said["step"] == 10 and said["tensors"]["model.norm.weight"]["pieces"] == 2


def test_convert_keeps_everything_in_whole_tensors(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    src, dst = run / "checkpoints" / "step-00000010", tmp_path / "kept" / "step-00000010"
    code, out, _ = dmt(capsys, "convert", run, dst)
    assert code == 0 and f"wrote {dst}: step 10 of {src}" in out
    assert dmt(capsys, "verify", dst)[0] == 0
    tensors = load_file(dst / "state-00000.safetensors")
    before = SavedState(src)
    assert len(tensors) == 3 * len(before.shapes)
    for name, shape in before.shapes.items():
        for quantity in QUANTITIES:
            columns = f",0:{shape[1]}" if len(shape) > 1 else ""
            found = tensors[f"{quantity}/{name}[0:{shape[0]}{columns}]"]
            assert torch.equal(found, before.read(quantity, whole_block(name, shape)))
    old, new = Manifest.read(src), Manifest.read(dst)
    assert (old.step, old.layout, old.recipe) == (new.step, new.layout, new.recipe)
    found = find_newest(CheckpointStore(dst.parent, keep=1), expected=True)
    assert found is not None and found.folder == dst and not found.skipped


def test_damage_does_not_become_part_of_a_good_checkpoint(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    flip(run / "checkpoints" / "step-00000010" / "state-00000.safetensors")
    for verb in ("convert", "export"):
        code, _, err = dmt(capsys, verb, run, tmp_path / "out")
        assert code == 2 and "state-00000.safetensors was changed" in err
        assert not (tmp_path / "out").exists()


def test_export(run: Path, tmp_path: Path, capsys: Captured) -> None:
    code, out, err = dmt(capsys, "export", run, tmp_path / "model")
    assert code == 0 and "verifying the checkpoint first" in err and "wrote" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = SavedState(run / "checkpoints" / "step-00000010")
    norm = saved.read("weight", whole_block("model.norm.weight", (64,)))
    assert torch.equal(model.model.norm.weight, norm)
    code, out, err = dmt(capsys, "export", run, tmp_path / "m2", "--no-verify", "--json")
    assert code == 0 and "verifying" not in err
    assert json.loads(out)["verified"] is False
    words = "export", run, tmp_path / "m3", "--no-verify", "--shard-size"
    for size in ("5", "-1GB", "0KB", "large"):
        code, _, err = dmt(capsys, *words, size)
        assert (
            code == 2 and f"--shard-size: found '{size}'" in err and "--shard-size 2GB" in err
        )
    assert dmt(capsys, *words, "100KB")[0] == 0
    files = [*(tmp_path / "m3").glob("*.safetensors")]
    assert len(files) > 1 and max(file.stat().st_size for file in files) <= 100_000 + 4096
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m3").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    code, _, err = dmt(capsys, "export", run, tmp_path / "model")
    assert code == 2 and "exists and is not empty" in err


def fits(run: Path, capsys: Captured, *changes: str) -> tuple[int, dict[str, tuple[str, str]]]:
    words = [word for change in changes for word in ("--set", change)]
    recipe = run.parent / "recipe.yaml"
    code, out, _ = dmt(capsys, "fits", recipe, run, "--json", *words)
    said = json.loads(out)
    assert said["fits"] is (code == 0)
    return code, {part["what"]: (part["verdict"], part["why"]) for part in said["parts"]}


def test_fits_on_the_same_layout(run: Path, capsys: Captured) -> None:
    code, parts = fits(run, capsys)
    assert code == 0
    assert parts["layout"] == (
        "kept",
        "ddp dp1, micro batch 4 × 1: bitwise the uninterrupted run",
    )
    assert parts["step and schedule"] == ("kept", "continues after step 10 of 20")
    code, out, err = dmt(capsys, "fits", run.parent / "recipe.yaml", run)
    assert code == 0 and "fits" in out and f"--run-dir {run}" in err


def test_a_renamed_folder_is_the_step_of_its_manifest_for_every_verb(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000005").rename(folder / "step-00000020")
    renamed = folder / "step-00000020"
    assert "step-00000010 is the newest" in dmt(capsys, "inspect", run)[2]
    lines = dmt(capsys, "list", run)[1].splitlines()
    assert lines[1].split()[:2] == ["5", "(step-00000020)"]
    assert lines[2].startswith("10  ")
    code, out, err = dmt(capsys, "verify", renamed)
    assert code == 0 and "is whole" in out and "it is the checkpoint of step 5" in err
    recipe = run.parent / "recipe.yaml"
    assert "after step 5 of 20" in dmt(capsys, "fits", recipe, renamed)[1]
    assert "wrote" in dmt(capsys, "convert", renamed, tmp_path / "step-00000005")[1]
    assert "step 5 of" in dmt(capsys, "export", renamed, tmp_path / "model")[1]
    found = find_newest(CheckpointStore(folder, keep=1), expected=True)
    assert found is not None and (found.manifest.step, found.skipped) == (10, ())
    shutil.rmtree(folder / "step-00000010")
    found = find_newest(CheckpointStore(folder, keep=1), expected=True)
    assert found is not None and (found.manifest.step, found.folder) == (5, renamed)


@pytest.mark.parametrize(
    ("change", "part", "verdict", "told"),
    [
        ("model.config.hidden_size=128", "weights and moments", "refused", "[320, 64] in the"),
        ("model.config.num_hidden_layers=3", "weights and moments", "refused", "not in the ch"),
        ("model.config.num_hidden_layers=1", "weights and moments", "refused", "model: model"),
        ("model.config.rope_theta=5000.0", "weights and moments", "refused", "5000.0 now"),
        ("training.seed=7", "data cursor", "refused", "training.seed: 1234 then, 7 now"),
        ("training.sequence_length=32", "data cursor", "refused", "16 then, 32 now"),
        ("data.validation_fraction=0.5", "data cursor", "refused", "0.0 then, 0.5 now"),
        ("data.cache=/tmp/c", "other settings", "changed", "data.cache"),
        ("training.precision=bf16", "precision", "refused", "fp32 then, bf16 now"),
        ("optimizer.learning_rate=0.1", "step and schedule", "refused", "0.1 now"),
        ("training.steps=40", "step and schedule", "changed", "next learning rate 0.00"),
        ("training.steps=10", "step and schedule", "changed", "nothing is left"),
        ("cluster.gpus_per_node=2", "layout", "changed", "ddp dp2, micro batch 2 × 1 now"),
        ("checkpoint.resume=never", "resume", "refused", "never"),
        ("name=other", "other settings", "refused", "name: small then, other now"),
        ("evaluation.batches=3", "other settings", "changed", "20 then, 3 now"),
    ],
)
def test_fits_names_what_differs(
    run: Path, capsys: Captured, change: str, part: str, verdict: str, told: str
) -> None:
    code, parts = fits(run, capsys, change)
    assert code == (2 if verdict == "refused" else 0)
    assert parts[part][0] == verdict and told in parts[part][1]
    if verdict == "refused":
        assert [p for p, (v, _) in parts.items() if v == "refused"] == [part]


def test_a_mistake_is_one_message(run: Path, tmp_path: Path, capsys: Captured) -> None:
    damage(run)
    folder = run / "checkpoints"
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["verify", tmp_path / "nowhere"], "does not exist"),
        (["verify", tmp_path / "empty"], "neither a checkpoint nor a run directory"),
        (["list", tmp_path / "empty"], "neither a checkpoint nor a run directory"),
        (["inspect", folder / "step-00000012.tmp"], "what an interrupted save left"),
        (["inspect", folder / "step-00000013"], "states no format"),
        (["convert", folder / "step-00000010", tmp_path / "empty"], "exists"),
        (["convert", folder / "step-00000010", tmp_path / "step-00000011"], "name it"),
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
    words = [["verify"], ["inspect"], ["convert", tmp_path / "a"]]
    words += [["export", tmp_path / "b", *more] for more in ([], ["--no-verify"])]
    for verb, *more in words:
        if verb == "inspect" and name != "manifest.json":
            continue  # reads manifest and index
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


def test_control_characters_do_not_reach_the_terminal(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Of a manifest, which is signed by nobody, and of a hub folder's config."""
    folder = run / "checkpoints" / "step-00000010"
    manifest, evil = Manifest.read(folder), "\x1b[2J\x1b]0;owned\x07\u202e"
    files = manifest.files | {f"state-{evil}.safetensors": manifest.files["hf/config.json"]}
    replace(
        manifest,
        engine=evil,
        files=files,
        recipe=manifest.recipe | {"name": evil},
        versions={"dmt": evil, "packages": {"torch": evil}},
    ).write(folder)
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps({"model_type": evil, evil: evil}))
    recipe = run.parent / "recipe.yaml"
    printed = [
        dmt(capsys, verb, folder, *more)
        for verb, *more in (["verify"], ["inspect"], ["export", tmp_path / "out"])
    ]
    printed += [dmt(capsys, "list", run), dmt(capsys, "fits", recipe, folder)]
    on_hub = ["--set", "model.config=null", "--set", f"model.hub={hub}"]
    code = main(["plan", str(recipe), *on_hub])
    printed.append((code, *capsys.readouterr()))
    for code, out, err in printed:
        assert "owned" in out + err or code == 0
        assert not {"\x1b", "\x07", "\u202e"} & set(out + err), (out, err)


@pytest.mark.parametrize("verb", ["list", "verify", "inspect", "convert", "export", "fits"])
def test_help_has_an_example(verb: str, capsys: Captured) -> None:
    code, out, _ = dmt(capsys, verb, "--help")
    assert code == 0 and f"Example: dmt checkpoint {verb} " in out
