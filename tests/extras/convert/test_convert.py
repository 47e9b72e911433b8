"""`dmt convert`: there and back bit by bit, and read and written by the real megatron-core."""

import copyreg
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.extras.convert.converting import (
    assert_same_model,
    change_config,
    rewrite,
    tensors_of,
    to_hf_folder,
    to_megatron_folder,
)
from tests.models.configs import CONFIGS, config_of
from tests.models.in_megatron import check, run_cases, save_random_model
from toolkit.errors import CheckpointError, DataError, DmtError
from toolkit.extras.convert import to_huggingface, to_megatron
from toolkit.extras.convert.source import open_source
from toolkit.extras.convert.to_huggingface import ToHuggingFace
from toolkit.extras.convert.to_megatron import ToMegatron
from toolkit.extras.convert.torch_dist import Reader
from toolkit.models import safetensors_stream
from toolkit.models.new_folder import appearing, check_destination
from toolkit.models.safetensors_stream import TensorToWrite, write_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_random_model(config_of("llama"), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("case", CONFIGS)
def test_there_and_back_is_bit_identical(case: str, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    save_random_model(config_of(case), hf)
    rewrite(hf, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    (hf / "tokenizer.json").write_text("{}")
    megatron = to_megatron_folder(hf, tmp_path / "megatron")
    back = to_hf_folder(megatron, tmp_path / "back")
    assert_same_model(back, hf)
    assert sorted(f.name for f in back.iterdir()) == sorted(f.name for f in hf.iterdir())


def test_tensors_in_many_pieces(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of three rows cuts through every head group."""
    monkeypatch.setattr(to_megatron, "CHUNK_ELEMENTS", 3 * 64)
    monkeypatch.setattr(to_huggingface, "PIECE_ELEMENTS", 5 * 64)
    monkeypatch.setattr(safetensors_stream, "LARGEST_FILE_BYTES", 1)
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    assert_same_model(to_hf_folder(megatron, tmp_path / "back"), llama)


LAYOUTS = {
    "llama": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "qwen2": {"tp": 2, "pp": 2},
    "gpt2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "gpt_neox tied": {"tp": 2, "pp": 2},
    "llama tied with biases": {"tp": 4},
    "mixtral": {"pp": 2, "dp": 2, "ep": 2},
    "deepseek_v3": {"tp": 2, "sequence_parallel": True, "pp": 2},
    "glm4_moe": {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2},
    "gpt_oss": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "llama4_text": {"tp": 2, "sequence_parallel": True, "pp": 2},
    "llama4_text all experts": {"dp": 2, "ep": 2, "pp": 2},
    "qwen2_moe partly dense": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "qwen3_moe": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "qwen3_moe partly dense": {"pp": 2, "dp": 2, "ep": 2},
}


@pytest.mark.slow
def test_megatron_core_reads_it_in_any_layout_and_what_it_saves_comes_back(
    tmp_path: Path,
) -> None:
    """Four real ranks load our checkpoint, compute transformers' logits, and save their own."""
    cases = []
    for case, layout in LAYOUTS.items():
        hf = tmp_path / case / "hf"
        save_random_model(config_of(case), hf)
        megatron = to_megatron_folder(hf, tmp_path / case / "megatron")
        load, save = str(megatron / "release"), str(tmp_path / case / "saved" / "iter_0000007")
        cases.append(
            {"name": case, "folder": str(hf), "layout": layout, "load": load, "save": save}
        )
    check(run_cases(cases, world=4), cases)
    for case in LAYOUTS:
        hf, saved = tmp_path / case / "hf", tmp_path / case / "saved"
        (saved / "latest_checkpointed_iteration.txt").write_text("7\n")
        back = to_hf_folder(saved, tmp_path / case / "back", hf / "config.json")
        assert_same_model(back, hf)


def test_vocabulary_is_padded_with_zeros_and_cut_again(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron", vocab_multiple=48)
    reader = Reader(megatron / "release")
    key = "embedding.word_embeddings.weight"
    assert reader.tensors[key].size == (144, 64)
    assert not reader.read(key, (101, 0), (43, 64)).any()
    assert reader.read(key, (0, 0), (101, 64)).any(dim=1).all()
    assert_same_model(to_hf_folder(megatron, tmp_path / "back"), llama)


def test_what_megatron_has_no_place_for_is_kept(llama: Path, tmp_path: Path) -> None:
    """Old checkpoints hold buffers, and names without the decoder's prefix."""

    def as_of_old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.removeprefix("model."): t for name, t in tensors.items()}
        return renamed | {"layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4.0)}

    rewrite(llama, as_of_old)
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    assert_same_model(to_hf_folder(megatron, tmp_path / "back"), llama)


def test_weights_that_the_config_does_not_mention_are_refused(
    llama: Path, tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"holds model\.layers\.3\.input_layernorm\.weight, .*"):
        to_megatron_folder(llama, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_a_stack_of_too_few_experts_is_refused(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    save_random_model(config_of("gpt_oss"), hf)
    name = "model.layers.2.mlp.experts.down_proj"
    rewrite(hf, lambda tensors: tensors | {name: tensors[name][:3].clone()})
    with pytest.raises(DataError, match=rf"{name} has shape \(3, 96, 64\), the model needs"):
        to_megatron_folder(hf, tmp_path / "megatron")


def test_sharded_files_and_their_index(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    entries = [
        TensorToWrite(name, t.dtype, tuple(t.shape), lambda t=t: t.split(7))  # type: ignore[misc]
        for name, t in tensors.items()
    ]
    write_model(tmp_path, entries, limit=60_000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 70_000 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    shutil.copy(llama / "config.json", tmp_path)
    (llama / "model.safetensors").unlink()
    for file in [*files, tmp_path / "model.safetensors.index.json"]:
        shutil.move(file, llama)
    back = to_hf_folder(to_megatron_folder(llama, tmp_path / "m"), tmp_path / "back")
    assert tensors_of(back).keys() == tensors.keys()


# --- mistakes ---------------------------------------------------------------------------


def test_crafted_index_runs_no_code(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    (megatron / "release" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names (posix|os)\.system"):
        to_hf_folder(megatron, tmp_path / "back")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back").exists()


def test_members_of_enums_by_getattr(llama: Path, tmp_path: Path) -> None:
    """So Python 3.11.0 to 3.11.3 write them."""
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    index = megatron / "release" / ".metadata"
    metadata, written = pickle.loads(index.read_bytes()), io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.dispatch_table = copyreg.dispatch_table | {
        _MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))
    }
    pickler.dump(metadata)
    assert b"getattr" in written.getvalue()
    index.write_bytes(written.getvalue())
    to_hf_folder(megatron, tmp_path / "back")


def test_getattr_of_an_index_class_is_refused(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron")

    class Sly:
        def __reduce__(self) -> Any:
            return getattr, (Metadata, "__init__")

    (megatron / "release" / ".metadata").write_bytes(pickle.dumps(Sly()))
    with pytest.raises(CheckpointError, match="getattr, which no index needs but for an Enum"):
        to_hf_folder(megatron, tmp_path / "back")


def test_crafted_data_runs_no_code(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    data, index = megatron / "release" / "__0_0.distcp", megatron / "release" / ".metadata"
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = data.stat().st_size, buffer.tell()
    index.write_bytes(pickle.dumps(metadata))
    with data.open("ab") as file:
        file.write(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"cannot be read \(UnpicklingError\)"):
        to_hf_folder(megatron, tmp_path / "back")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, r"no tensor model\.layers\.4"),
        ({"vocab_size": 99}, "has shape"),
        ({"attention_bias": True}, "bias"),
        ({"hidden_act": "relu"}, "relu"),
        ({"model_type": "bert"}, "model_type: found 'bert'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_model_that_cannot_be_converted_is_refused(
    llama: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(llama, **changes)
    with pytest.raises(DmtError, match=message):
        ToMegatron(open_source(llama), 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "has shape"),
        ({"num_hidden_layers": 5}, "has shape"),
        ({"tie_word_embeddings": True}, r"has no output_layer\.weight"),
        ({"vocab_size": 1000}, "has shape"),
        ({"intermediate_size": 97}, "has shape"),
        ({"attention_bias": True, "mlp_bias": True}, r"it has no .*bias"),
    ],
)
def test_config_of_another_model_is_refused(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    change_config(megatron / "hf", **changes)
    with pytest.raises(CheckpointError, match=message):
        ToHuggingFace(open_source(megatron))


def test_dtypes_that_one_megatron_tensor_cannot_hold(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(llama, lambda tensors: tensors | {name: tensors[name].half()})
    with pytest.raises(DataError, match="differ in dtype"):
        to_megatron_folder(llama, tmp_path / "megatron")
    assert [f.name for f in tmp_path.iterdir()] == ["hf"], "nothing half-written stays"


def test_source_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a Hugging Face model"):
        open_source(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match=r"iter_0000100 has no metadata\.json"):
        open_source(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../x")
    with pytest.raises(CheckpointError, match="neither a step nor release"):
        open_source(tmp_path)


def test_checkpoint_without_config_asks_for_it(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    shutil.rmtree(megatron / "hf")
    with pytest.raises(DataError, match="--config"):
        open_source(megatron)
    back = to_hf_folder(megatron, tmp_path / "back", llama / "config.json")
    assert_same_model(back, llama)


def test_destination(llama: Path, tmp_path: Path) -> None:
    check_destination(llama, tmp_path / "new" / "deep", 10)
    full = tmp_path / "full"
    full.mkdir()
    check_destination(llama, full, 10)
    (full / "mine").write_text("x")
    with pytest.raises(DataError, match="not empty"):
        check_destination(llama, full, 10)
    with pytest.raises(DataError, match="lies inside"):
        check_destination(llama, llama / "out", 10)
    with pytest.raises(DataError, match="GB free"):
        check_destination(llama, tmp_path / "new", 10**18)


def test_failure_leaves_nothing_and_success_fills_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), appearing(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with appearing(tmp_path / "out") as folder:
        (folder / "whole").write_text("x")
        assert not (tmp_path / "out" / "whole").exists()
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["whole"]
