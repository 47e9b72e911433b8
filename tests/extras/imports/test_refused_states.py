"""States that only look like those of AdamW, odd numbers and damaged containers are refused."""

import json
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from tests.checkpoint.making import MODEL, write_recipe
from tests.dmt import Dmt
from tests.extras.imports.archives import HUGE, NEOX, zipped
from tests.models.small import filled
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import ForeignState, RecipeModel
from toolkit.extras.imports.deepspeed import DEEPSPEED
from toolkit.extras.imports.gpt_neox import GPT_NEOX
from toolkit.extras.imports.pickles import load_pickle
from toolkit.extras.imports.run import recipe_model, require_same_model
from toolkit.extras.imports.trainer import TRAINER
from toolkit.intake.load import load_recipe

EMBEDDING = "tied_modules.embed.word_embeddings.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecipeModel:
    return recipe_model(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


def trainer_folder(
    folder: Path, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> Path:
    folder.mkdir()
    model = filled(MODEL)
    model.save_pretrained(folder)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **{"lr": 1e-3, "weight_decay": 0.1} | settings)  # type: ignore[arg-type]
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 1, "base_lrs": [1e-3]}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "max_steps": 20}))
    return folder


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.Adam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adamax, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "".join(value),
)
def test_trainers_other_optimizers(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    model: RecipeModel,
    tmp_path: Path,
) -> None:
    folder = trainer_folder(tmp_path / "saved", kind, **settings)
    with pytest.raises(CheckpointError, match="only plain AdamW's states are read"):
        TRAINER.read(folder, model)


def test_a_link_in_a_trainers_folder(model: RecipeModel, tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "saved")
    require_same_model(TRAINER.read(folder, model), model)
    file = folder / "model.safetensors"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="regular file"):  # which the command reports
        TRAINER.read(folder, model)


def zero_part(
    folder: Path, part: str, shapes: Mapping[str, tuple[int, ...]], changes: dict[str, Any]
) -> None:
    """DeepSpeed's two files of one rank and one part of the model."""
    torch.manual_seed(1)
    values = {name: torch.randn(shape).view(-1) for name, shape in shapes.items()}
    if EMBEDDING in shapes:
        values[EMBEDDING] = torch.arange(float(values[EMBEDDING].numel()))
    flat, fragments, start = torch.cat([*values.values()]), {}, 0
    for name, value in values.items():
        fragments[name] = fragment_address(numel=value.numel(), start=start)
        start += value.numel()
    saved: dict[str, Any] = {
        "optimizer": None, "module": {}, "buffer_names": [], "shared_params": {},
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "global_steps": 2, "skipped_steps": 0, "global_samples": 8, "ds_config": {},
    }  # fmt: skip
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    state: dict[str, Tensor] = {
        "exp_avg": flat * 2, "exp_avg_sq": flat**2, "step": torch.tensor(2.0)
    }  # fmt: skip
    moments = {"state": {0: state}, "param_groups": [group | {"params": [0]}]}
    rank = {
        "zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [flat],
        "param_slice_mappings": [fragments], "base_optimizer_state": moments,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    torch.save(saved | changes, folder / f"mp_rank_{part}_model_states.pt")
    torch.save(
        {"optimizer_state_dict": rank},
        folder / f"zero_pp_rank_0_mp_rank_{part}_optim_states.pt",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ds_config": {"optimizer": {"type": "Lamb"}}}, "its optimizer was Lamb:"),
        (
            {"ds_config": {"optimizer": {
                "type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}
            }}},
            "its optimizer was Adam with adam_w_mode: false",
        ),
        ({"global_samples": "x"}, "global_samples is 'x'"),
        ({"global_samples": -5}, "consumed_samples is -5"),
        ({"global_samples": 20.5}, "global_samples is 20.5"),
        ({"global_steps": -3}, "step is -3"),
        ({"global_steps": 123456789}, "step is 123456789"),
        (
            {"module": {"x.y": torch.arange(16.0)[None].expand(1 << 24, 16)}},
            "more elements than are stored",
        ),
    ],
)  # fmt: skip
def test_deepspeeds(
    changes: dict[str, Any], message: str, model: RecipeModel, tmp_path: Path
) -> None:
    zero_part(tmp_path / "saved", "00", model.parameters, {})
    require_same_model(DEEPSPEED.read(tmp_path / "saved", model), model)
    zero_part(tmp_path / "saved", "00", model.parameters, changes)
    with pytest.raises(CheckpointError, match=message):
        DEEPSPEED.read(tmp_path / "saved", model)


def test_differences_are_named(model: RecipeModel, tmp_path: Path) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 9.0}},
        "scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": True},
    }  # fmt: skip
    zero_part(tmp_path / "zero", "00", model.parameters, {"ds_config": config})
    state = DEEPSPEED.read(tmp_path / "zero", model)
    assert state.settings["optimizer.learning_rate"] == 9.0
    assert state.settings["training.precision"] == "bf16"
    assert "norms and biases had a weight decay of 0.1" in state.notes[0]
    assert "its schedule was DeepSpeed's WarmupLR" in state.notes[1]
    plain = trainer_folder(tmp_path / "trainer")
    assert TRAINER.read(plain, model).notes == ()
    saved = torch.load(plain / "optimizer.pt")
    saved["param_groups"][1] |= {"weight_decay": 0.3, "lr": 1.0}
    torch.save(saved, plain / "optimizer.pt")
    decay, rate = TRAINER.read(plain, model).notes
    assert "weight decay of 0.3" in decay and "learning rates of 0.001, 1.0" in rate


def test_no_tag_leads_out_of_the_folder(model: RecipeModel, tmp_path: Path) -> None:
    zero_part(tmp_path, "00", model.parameters, {})
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "latest").write_text("..")
    with pytest.raises(CheckpointError, match="names a folder outside: '\\.\\.'"):
        DEEPSPEED.matches(folder)
    (folder / "link").symlink_to(tmp_path)
    (folder / "latest").write_text("link")
    with pytest.raises(CheckpointError, match="names a folder outside: 'link'"):
        DEEPSPEED.matches(folder)


def test_neox_with_a_tied_embedding_in_two_parts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    tied = NEOX.replace("gpt_neox,", "gpt_neox, tie_word_embeddings: true,")
    recipe.write_text(re.sub(r"  config: {.*?}\n", tied, recipe.read_text(), flags=re.S))
    model = recipe_model(load_recipe(recipe))
    first: dict[str, tuple[int, ...]] = {EMBEDDING: (320, 64)}
    last: dict[str, tuple[int, ...]] = {"5.norm.weight": (64,), "5.norm.bias": (64,)}
    for name, shape in model.parameters.items():
        if name.startswith("gpt_neox.layers."):
            layer, _, rest = name.removeprefix("gpt_neox.layers.").partition(".")
            (first, last)[int(layer)][f"{int(layer) + 2}.{rest}"] = shape
    last[EMBEDDING] = (320, 64)
    folder = tmp_path / "saved"
    zero_part(folder, "00", first, {})
    zero_part(folder, "01", last, {})
    state = GPT_NEOX.read(folder, model)
    require_same_model(state, model)
    (embedding,) = (s for s in state.shards if s.blocks[0].tensor == "gpt_neox.embed_in.weight")
    assert torch.equal(embedding.get("weight"), torch.arange(320.0 * 64))
    file = folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    saved = torch.load(file, weights_only=False)
    saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][-1] += 1
    torch.save(saved, file)
    with pytest.raises(CheckpointError, match="another exp_avg"):
        GPT_NEOX.read(folder, model)


def spliced(hidden: bytes, seen: bytes) -> bytes:
    """Two archives of the same size of list in a file: torch reads the first one's entries,
    Python the second one's, as the last record's offset is that of the first list."""

    def parts(archive: bytes) -> tuple[bytes, bytearray, int]:
        count, size, start = struct.unpack("<10xHLL2x", archive[-22:])
        return archive[:start], bytearray(archive[start : start + size]), count

    (content, entries, count), (others, listed, _) = parts(hidden), parts(seen)
    before, position = len(content) + len(entries), 0
    shift = before + len(others) - len(content)
    while position < len(listed):
        lengths = struct.unpack_from("<3H", listed, position + 28)
        (offset,) = struct.unpack_from("<L", listed, position + 42)
        struct.pack_into("<L", listed, position + 42, before + offset - shift)
        position += 46 + sum(lengths)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(listed), len(content), 0)
    return content + bytes(entries) + others + bytes(listed) + last


def test_python_and_torch_read_the_same_list_of_entries(tmp_path: Path) -> None:
    hidden = b"\x80\x02cbuiltins\nbytearray\n" + HUGE + b"\x85R."
    seen = b"\x80\x02X" + (len(hidden) - 8).to_bytes(4, "little") + b"g" * (len(hidden) - 8)
    file = tmp_path / "file.pt"
    file.write_bytes(spliced(zipped(hidden, b"\0" * 4000), zipped(seen + b".")))
    with zipfile.ZipFile(file) as archive:
        assert archive.read("archive/data.pkl") == seen + b"."
    with pytest.raises(CheckpointError, match="is refused: its list of entries"):
        load_pickle(tmp_path, file.name)


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_pickle(tmp_path, "file.pt")["x"].tolist() == [1.0] * 3


def counters(**changes: Any) -> ForeignState:
    numbers: dict[str, Any] = {"step": 1, "optimizer_steps": 1, "shards": ()}
    return ForeignState(**numbers | changes)


@pytest.mark.parametrize("changes", [{"step": 10**8}, {"optimizer_steps": -1}, {"step": True}])
def test_impossible_counters(changes: dict[str, Any]) -> None:
    assert counters().step == 1
    with pytest.raises(CheckpointError, match="not a number from 0 to"):
        counters(**changes)


def with_a_nan(folder: Path) -> None:
    saved = torch.load(folder / "optimizer.pt")
    saved["state"][3]["exp_avg"].view(-1)[7] = float("nan")
    torch.save(saved, folder / "optimizer.pt")


def test_a_failed_import_leaves_no_run(tmp_path: Path, dmt: Dmt) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    (tmp_path / "a.txt").write_text("text " * 200)
    source = trainer_folder(tmp_path / "saved")
    with_a_nan(source)
    words = ("checkpoint", "import", recipe, source, "--run-dir", run)
    printed = dmt(*words, "--samples", 10**18, code=2)
    assert "--samples 1000000000000000000: no run" in printed.err
    printed = dmt(*words, code=2)
    assert "exp_avg" in printed.err and "layers.0" in printed.err
    assert not run.exists()
