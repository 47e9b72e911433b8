"""`dmt convert` on folders that are damaged, unusual, or say two things at once."""

import json
import pickle
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.extras.convert.converting import (
    assert_same_model,
    change_config,
    rewrite,
    tensors_of,
    to_hf_folder,
    to_megatron_folder,
)
from tests.models.configs import LLAMA3, config_of
from tests.models.in_megatron import save_random_model
from toolkit.errors import CheckpointError, DataError
from toolkit.extras.convert.source import ConvertibleModel, open_source
from toolkit.extras.convert.to_huggingface import ToHuggingFace
from toolkit.extras.convert.to_megatron import ToMegatron
from toolkit.extras.convert.torch_dist import Reader, Writer
from toolkit.models.new_folder import appearing, check_destination

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_random_model(config_of("llama"), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def megatron(llama: Path, tmp_path: Path) -> Path:
    return to_megatron_folder(llama, tmp_path / "megatron")


def saved_again(src: Path, dst: Path, change: Any) -> Path:
    """A checkpoint whose tensors are those of `src`, changed; `change` maps dict to dict."""
    reader = Reader(src)
    tensors = {
        key: reader.read(key, (0,) * len(whole.size), whole.size).clone()
        for key, whole in reader.tensors.items()
    }
    with Writer(dst) as writer:
        for key, tensor in change(tensors).items():
            writer.add(key, tensor.shape, (0,) * tensor.ndim, tensor)
        writer.finish({})
    return dst


# --- tied embeddings of which the files hold both -----------------------------------------

TIED = {
    "llama tied with biases": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "gpt_neox tied": ("embed_out.weight", "gpt_neox.embed_in.weight"),
}


@pytest.mark.parametrize("case", TIED)
def test_stored_copy_of_a_tied_head_follows_the_embedding(case: str, tmp_path: Path) -> None:
    """Trained on and converted back, both names hold the new embedding, as transformers'."""
    head, embedding = TIED[case]
    hf = tmp_path / "hf"
    save_random_model(config_of(case), hf)
    rewrite(hf, lambda tensors: tensors | {head: tensors[embedding].clone()})
    folder = to_megatron_folder(hf, tmp_path / "megatron")
    assert_same_model(to_hf_folder(folder, tmp_path / "back"), hf)

    saved_again(
        folder / "release",
        folder / "iter_0000005",
        lambda tensors: tensors | {EMBEDDING: tensors[EMBEDDING] + 0.5},
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    trained = to_hf_folder(folder, tmp_path / "trained")
    expected = tensors_of(hf)[embedding] + 0.5
    found = tensors_of(trained)
    assert torch.equal(found[head], expected) and torch.equal(found[embedding], expected)
    model = AutoModelForCausalLM.from_pretrained(trained)
    output = model.get_output_embeddings().weight
    assert output is model.get_input_embeddings().weight and torch.equal(output, expected)


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize(
    "other",
    [lambda x: x + 1, lambda x: torch.cat([x[:-1], -x[-1:]]), lambda x: x.half()],
    ids=["all", "last row", "dtype"],
)
def test_head_that_is_tied_and_yet_another_is_refused(
    case: str, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.models.weights._COMPARED_ELEMENTS", 3 * 64)
    head, embedding = TIED[case]
    save_random_model(config_of(case), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {head: other(tensors[embedding])})
    with pytest.raises(DataError, match=f"{head} is not the same.*\n.*tie_word_embeddings"):
        ToMegatron(open_source(tmp_path), 128)


# --- config keys that transformers reads in unusual places -------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original_max_position_embeddings": 16}, None),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: found 0\.5"),
        ({"partial_rotary_factor": 1.0, "original_max_position_embeddings": 8192}, None),
        (
            {
                "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
                "original_max_position_embeddings": 8192,
            },
            None,
        ),
    ],
)
def test_rotary_keys_beside_their_map(
    llama: Path, changes: dict[str, Any], message: str | None
) -> None:
    """They are read as transformers reads them."""
    plain = {"rope_scaling": LLAMA3, "rope_parameters": None, "rope_theta": 1e4}
    change_config(llama, **plain | changes)
    if message is not None:
        with pytest.raises(DataError, match=message):
            open_source(llama)
        return
    source = open_source(llama)
    # The config alone does not say it: the model changes the map when it is built.
    theirs = AutoModelForCausalLM.from_pretrained(llama).config.rope_parameters
    assert source.notes == ()
    assert source.config["rope_scaling"].items() <= theirs.items()
    assert theirs.get("partial_rotary_factor", 1.0) == 1.0


def test_rotary_share_under_a_name_that_gpt_neox_does_not_read(tmp_path: Path) -> None:
    save_random_model(config_of("gpt_neox"), tmp_path)
    change_config(tmp_path, rope_parameters=None, partial_rotary_factor=0.5)
    source = open_source(tmp_path)
    assert source.notes == ("config.json: DMT does not know partial_rotary_factor",)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).config.rope_parameters
    assert source.model.gpt["rotary_percent"] == theirs["partial_rotary_factor"] == 0.25


def test_keys_that_dmt_does_not_know_are_named(llama: Path) -> None:
    change_config(llama, my_note="x")
    assert open_source(llama).notes == ("config.json: DMT does not know my_note",)


# --- what belongs to which side ------------------------------------------------------------


def test_config_in_the_iteration_folder_brings_no_checkpoint_along(
    llama: Path, megatron: Path, tmp_path: Path
) -> None:
    for file in (llama / "config.json", llama / "generation_config.json"):
        shutil.copy(file, megatron / "release")
    shutil.rmtree(megatron / "hf")
    back = to_hf_folder(megatron, tmp_path / "back")
    assert_same_model(back, llama)
    assert sorted(f.name for f in back.iterdir()) == sorted(f.name for f in llama.iterdir())


def test_metadata_json_of_a_hugging_face_folder(llama: Path, tmp_path: Path) -> None:
    (llama / "metadata.json").write_text('{"author": "me"}')
    megatron = to_megatron_folder(llama, tmp_path / "megatron")
    back = to_hf_folder(megatron, tmp_path / "back")
    assert (back / "metadata.json").read_text() == '{"author": "me"}'
    (llama / "metadata.json").write_text("free text")
    assert not open_source(llama).is_megatron


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sharded_backend": "zarr"}', "format 'zarr'"),
        ("{", r"metadata\.json cannot be read"),
    ],
)
def test_other_checkpoint_formats(megatron: Path, text: str, message: str) -> None:
    (megatron / "release" / "metadata.json").write_text(text)
    for folder in (megatron, megatron / "release"):
        with pytest.raises(CheckpointError, match=message):
            open_source(folder)


# --- destination ---------------------------------------------------------------------------


def test_destination_whose_place_cannot_be_taken(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for dst, message in (
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "dangling", "symbolic link"),
        (Path("/proc"), "mount point"),
        (tmp_path / "file" / "out", "not a writable folder"),
        (tmp_path / "file", "not empty"),
    ):
        with pytest.raises(DataError, match=message):
            check_destination(llama, dst, 10)


def test_disk_that_fills_up_is_one_error(llama: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writes fail midway."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (3000, 40_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(DataError, match=rf"{tmp_path}/out failed.*File too large"):
                to_megatron_folder(llama, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_destination_that_someone_fills_meanwhile(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    with pytest.raises(DataError, match="out failed"), appearing(dst):
        dst.mkdir()
        (dst / "theirs").write_text("x")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (dst / "theirs").exists()


# --- damaged files -------------------------------------------------------------------------


def index_of(folder: Path, **changes: str) -> str:
    names = dict.fromkeys(tensors_of(folder), "model.safetensors")
    return json.dumps({"weight_map": names | changes})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (lambda _: "{}", r"index\.json cannot be read"),
        (lambda _: "{", r"index\.json cannot be read"),
        (lambda _: "[]", r"index\.json cannot be read"),
        (lambda _: '{"weight_map": {"a": 1}}', r"index\.json cannot be read"),
        (lambda hf: index_of(hf, extra="gone.safetensors"), r"gone\.safetensors cannot be"),
        (lambda hf: index_of(hf, extra="model.safetensors"), r"model\.safetensors has no ten"),
        (lambda hf: index_of(hf, extra="../x.safetensors"), "outside its folder"),
    ],
)
def test_damaged_index(llama: Path, index: Any, message: str) -> None:
    (llama / "model.safetensors.index.json").write_text(index(llama))
    with pytest.raises(DataError, match=message):
        ToMegatron(open_source(llama), 128)


def test_index_that_names_a_tensor_of_the_model_that_is_not_there(llama: Path) -> None:
    text = index_of(llama)
    rewrite(
        llama, lambda tensors: {n: t for n, t in tensors.items() if n != "model.norm.weight"}
    )
    (llama / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        DataError, match=r"model\.safetensors has no tensor model\.norm\.weight"
    ):
        ToMegatron(open_source(llama), 128)


def test_messages_speak_of_the_folder_and_not_of_a_recipe(llama: Path) -> None:
    change_config(llama, num_hidden_layers=5)
    with pytest.raises(DataError, match=r"check that config\.json") as missing:
        ToMegatron(open_source(llama), 128)
    (llama / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"no model\.safetensors") as pickled:
        ToMegatron(open_source(llama), 128)
    for error in (missing, pickled):
        assert "model.hub" not in str(error.value) and "model.config" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model.norm.weight": 3}'])
def test_damaged_names(megatron: Path, text: str) -> None:
    (megatron / "hf" / "tensors.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tensors\.json (cannot be read|does not fit)"):
        ToHuggingFace(open_source(megatron))


def test_names_without_the_head_of_an_untied_model(megatron: Path) -> None:
    file = megatron / "hf" / "tensors.json"
    names = json.loads(file.read_text())
    del names["lm_head.weight"]
    file.write_text(json.dumps(names))
    with pytest.raises(CheckpointError, match="does not fit"):
        ToHuggingFace(open_source(megatron))


def test_damaged_unmapped_tensors(megatron: Path) -> None:
    kept = megatron / "hf" / "unmapped.safetensors"
    kept.write_bytes(b"x")
    with pytest.raises(DataError, match=r"unmapped\.safetensors cannot be read"):
        ToHuggingFace(open_source(megatron))
    save_file({"model.norm.weight": torch.ones(64)}, kept)
    with pytest.raises(CheckpointError, match=r"names model\.norm\.weight twice"):
        ToHuggingFace(open_source(megatron))


def test_damaged_checkpoint_index_is_always_one_error(megatron: Path) -> None:
    file = megatron / "release" / ".metadata"
    whole, draw = file.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            Reader(megatron / "release")
        except CheckpointError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 100


SHARED = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
"""A tuple of 60 levels whose elements are shared: hashing or printing it never ends."""


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # memo place 2**28: 4 GiB in pickle's own unpickler
        b"\x80\x05\x96" + (1 << 32).to_bytes(8, "little") + b".",  # BYTEARRAY8 of 4 GiB
        b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b".",  # a frame of 1 TiB
        SHARED + b"}h\x3cNs.",
        SHARED + b"ccollections\nOrderedDict\nh\x3c\x85R.",
        SHARED + b"ctorch\nSize\nh\x3c\x85R.",
        SHARED + b"ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x01xh\x3csb.",
    ],
)
def test_an_index_takes_no_more_memory_or_time_than_its_size(
    content: bytes, megatron: Path
) -> None:
    (megatron / "release" / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"\.metadata is refused"):
        Reader(megatron / "release")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100_000, "KiB"


def test_index_whose_values_are_not_those_of_a_checkpoint(megatron: Path) -> None:
    file = megatron / "release" / ".metadata"
    whole = file.read_bytes()

    def refused(change: Any, message: str) -> None:
        metadata = pickle.loads(whole)
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            Reader(megatron / "release")

    def entry(metadata: Any) -> Any:
        return metadata.state_dict_metadata[EMBEDDING]

    def place(metadata: Any) -> Any:
        return next(iter(metadata.storage_data.values()))

    refused(lambda m: setattr(entry(m), "chunks", None), "is refused")
    refused(lambda m: setattr(entry(m), "size", torch.Size([-1, 64])), "for a size")
    refused(lambda m: setattr(entry(m), "size", torch.Size([128])), "contradicts itself")
    refused(lambda m: setattr(place(m), "relative_path", "../x"), "outside its folder")
    refused(lambda m: setattr(place(m), "offset", -1), "for a size")


def test_data_of_another_dtype_than_the_index_says(megatron: Path) -> None:
    file = megatron / "release" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    properties = metadata.state_dict_metadata[EMBEDDING].properties
    properties.dtype = torch.float16
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not what the index says"):
        Reader(megatron / "release").read(EMBEDDING, (0, 0), (1, 64))


# --- tensors that are left out --------------------------------------------------------------


def source_of(llama: Path, folder: Path) -> ConvertibleModel:
    return open_source(folder, llama / "config.json")


def with_rows(rows: int, value: float) -> Any:
    """Embedding and head with more rows behind the vocabulary's 101."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        added = torch.full((rows, 64), value)
        padded = {
            key: torch.cat([tensors[key][:101], added])
            for key in (EMBEDDING, "output_layer.weight")
        }
        return tensors | padded

    return change


@pytest.mark.parametrize(
    ("rows", "value", "vocab_multiple", "is_padding"),
    [
        (27, 0.1, 128, True),  # 128
        (155, 0.1, 128, True),  # 256: TP 2
        (3, 0.1, 128, False),  # 104
        (3, 0.1, 8, True),
        (3, 0.0, 128, True),
        (5000, 0.1, 128, False),
        (5000, 0.0, 128, True),
        (16384 - 101, 0.1, 128, False),  # a multiple of 128, too far away
    ],
)
def test_rows_beyond_the_vocabulary_are_told_or_refused(
    llama: Path, megatron: Path, tmp_path: Path,
    rows: int, value: float, vocab_multiple: int, is_padding: bool,
) -> None:  # fmt: skip
    saved = saved_again(megatron / "release", tmp_path / "saved", with_rows(rows, value))
    if is_padding:
        job = ToHuggingFace(source_of(llama, saved), vocab_multiple)
        assert job.notes == (f"{rows} rows of padding beyond vocab_size (101) are left out",)
        back = tmp_path / "back"
        back.mkdir()
        job.write(back, lambda _: None)
        assert_same_model(back, llama)
        return
    message = rf"{101 + rows} rows, {rows} more than the vocab_size 101.*\n.*--vocab-multiple"
    with pytest.raises(CheckpointError, match=message):
        ToHuggingFace(source_of(llama, saved), vocab_multiple)


def test_values_in_the_last_of_many_padding_rows(
    llama: Path, megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.extras.convert.to_huggingface.PIECE_ELEMENTS", 3 * 64)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = with_rows(20, 0.0)(tensors)
        tensors[EMBEDDING][-1, -1] = 1e-3
        return tensors

    saved = saved_again(megatron / "release", tmp_path / "saved", change)
    with pytest.raises(CheckpointError, match="hold values"):
        ToHuggingFace(source_of(llama, saved))


@pytest.mark.parametrize("key", ["mtp.layers.0.eh_proj.weight", "vision_model.patches"])
def test_weights_of_another_model_are_not_dropped(
    llama: Path, megatron: Path, tmp_path: Path, key: str
) -> None:
    extra = {key: torch.ones(4, 4)}
    saved = saved_again(megatron / "release", tmp_path / "saved", lambda t: t | extra)
    with pytest.raises(CheckpointError, match=f"the model has no {key}"):
        ToHuggingFace(source_of(llama, saved))


def test_training_state_is_left_behind(llama: Path, megatron: Path, tmp_path: Path) -> None:
    state = {
        key: torch.ones(4)
        for key in (
            "optimizer.state.exp_avg.decoder.final_layernorm.weight",
            "chained_1.optimizer.state.step",
            "rng_state",
            "decoder.layers.mlp.linear_fc1._extra_state",
        )
    }
    saved = saved_again(megatron / "release", tmp_path / "saved", lambda t: t | state)
    back = to_hf_folder(saved, tmp_path / "back", llama / "config.json")
    assert_same_model(back, llama)
