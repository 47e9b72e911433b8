"""The exported folder is the one that transformers itself would write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.conftest import MANIFEST
from tests.checkpoint.making import MODEL
from tests.data.chat.families import make_tokenizer
from tests.models.small import FAMILIES, filled, section, tiny
from tests.plan.making import recipe
from toolkit.checkpoint.export import export
from toolkit.checkpoint.export_adapters import base_weights, saved_lora
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard, parameter_blocks
from toolkit.checkpoint.store import CheckpointStore
from toolkit.data.tokenizers import CHATML
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf
from toolkit.models.judge import model_types
from toolkit.models.model import check_config
from toolkit.models.weights import correction_biases
from toolkit.recipe.schema import ModelSection
from toolkit.train.exporting import add_turn_ends


def checkpoint_of(model: Any, folder: Path, leave_out: str = "", **recipe: str) -> Path:
    """A checkpoint of a transformers model; a tensor may be forgotten."""
    state = [
        StateShard(
            parameter_blocks(name, value.shape),
            dict.fromkeys(QUANTITIES, value),
            saved_here=True,
        )
        for name, value in (*hf.named_parameters(model), *correction_biases(model).items())
        if name != leave_out
    ]
    made = folder / "companions"
    dtype = {"bf16": torch.bfloat16}.get(recipe.get("precision", ""), torch.float32)
    hf.save_companions(model.config, dtype, made)
    companions = {f"hf/{path.name}": path.read_bytes() for path in made.iterdir()}
    saver = Saver(CheckpointStore(folder, keep=1), asynchronous=False)
    manifest = replace(MANIFEST, recipe={"training": {"precision": "fp32"} | recipe})
    saver.save(manifest, state, companions)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None and saved.problem is None
    return folder / "step-00000001"


OF_EVERY_KIND = (
    "apertus", "camembert", "deepseek_v4", "ernie4_5_moe", "gpt_oss", "granitemoe", "jamba",
    "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe",
)  # fmt: skip
"""Saved buffers, another name of the embedding, renamed, stacked and split tensors."""
OTHERS = sorted({*model_types} - {*FAMILIES, *OF_EVERY_KIND})
TOO_LARGE = ("dbrx", "gemma4_unified_assistant")
"""No small config is known, or not one that transformers builds."""
MIXED = ("hrm_text", "inkling2_text")
"""transformers mixes the elements of a tensor when it saves them."""


@pytest.mark.parametrize(
    "model_type",
    [*FAMILIES, *OF_EVERY_KIND, *(pytest.param(one, marks=pytest.mark.soak) for one in OTHERS)],
)
def test_weights_come_back(model_type: str, tmp_path: Path) -> None:
    """transformers → start → checkpoint → export → transformers, bit for bit, and the files are
    those of `save_pretrained`."""
    config = tiny(model_type)
    if check_config(config) or model_type in TOO_LARGE:
        pytest.skip("no tiny config, or not for training")
    theirs = AutoModelForCausalLM.from_config(hf.build_config(ModelSection(config=config)))
    for tensor in tensors_of(theirs).values():
        tensor.data.normal_(std=0.1)
    padding = theirs.get_input_embeddings().padding_idx
    if padding is not None:
        theirs.get_input_embeddings().weight.data[padding] = 0  # as some load it
    pretrained, exported = tmp_path / "pretrained", tmp_path / "exported"
    theirs.save_pretrained(pretrained, save_original_format=model_type not in MIXED)
    model = filled(ModelSection(hub=str(pretrained), init="pretrained"))
    equal(tensors_of(model), tensors_of(theirs))
    export(checkpoint_of(model, tmp_path), exported)
    equal(*(load_file(folder / "model.safetensors") for folder in (exported, pretrained)))
    equal(tensors_of(AutoModelForCausalLM.from_pretrained(exported)), tensors_of(theirs))
    if model_type in FAMILIES:
        written = [json.loads((f / "config.json").read_text()) for f in (exported, pretrained)]
        assert written[0] == written[1]


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and correction biases."""
    return {**dict(model.named_parameters()), **correction_biases(model)}


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same tensors, but for buffers that models compute."""
    assert ours.keys() <= theirs.keys()
    for name, value in theirs.items():
        assert name not in ours or torch.equal(ours[name], value), name


def test_weights_have_the_precision_of_the_recipe(tmp_path: Path) -> None:
    model = filled(section("llama"))
    export(checkpoint_of(model, tmp_path, precision="bf16"), tmp_path / "ours")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    norm = "model.norm.weight"
    assert torch.equal(tensors[norm], dict(model.named_parameters())[norm].bfloat16())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_missing_tensor_is_named_and_nothing_appears(tmp_path: Path) -> None:
    """Regression: ZeRO-3 saves incomplete weights."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = checkpoint_of(filled(section("llama")), tmp_path, leave_out=name)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* it has None"):
        export(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_adapters_of_an_earlier_release() -> None:
    """Their manifest has settings that are gone."""
    section = {"rank": 4, "alpha": 8.0, "init": "gaussian", "folder": None}
    model = MODEL.model_dump(mode="json") | {"resize_embeddings": None}
    stated = {"adapter": section, "model": model, "training": {"seed": 1}}
    manifest = replace(MANIFEST, recipe=stated)
    base, lora = base_weights(manifest), saved_lora(manifest, hf.build_config(MODEL))
    assert lora is not None and lora.section.rank == 4 and lora.scaling == 2
    assert "model.norm.weight" in base.shapes
    stated["adapter"] = section | {"rslora": True}
    lora = saved_lora(manifest, hf.build_config(MODEL))
    assert lora is not None and lora.scaling == 4  # alpha / √rank


def test_a_model_from_nothing_may_use_its_cache(tmp_path: Path) -> None:
    """Generation without a cache is several times slower."""
    export(checkpoint_of(filled(section("llama")), tmp_path), tmp_path / "ours")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text())["use_cache"] is True, name


def test_a_pretrained_model_keeps_its_own_words(tmp_path: Path) -> None:
    """But for the type of the weights, and for dropout and cache that the recipe states."""
    base, made = tmp_path / "base", tmp_path / "made"
    filled(section("gpt2")).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    config |= {"torch_dtype": config.pop("dtype"), "transformers_version": "4.40.0", "x": [1]}
    config |= {"resid_pdrop": 0.1, "embd_pdrop": 0.2}
    (base / "config.json").write_text(json.dumps(config))
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 3], "_from": "base"}')
    stated = {"resid_pdrop": 0.3, "use_cache": False}
    model = section("gpt2", **stated).model_copy(
        update={"hub": str(base), "init": "pretrained"}
    )
    hf.save_companions(hf.build_config(model), torch.bfloat16, made, base, stated)
    found = json.loads((made / "config.json").read_text())
    assert found == config | stated | {"torch_dtype": "bfloat16"}
    generation = [(folder / "generation_config.json").read_bytes() for folder in (made, base)]
    assert generation[0] == generation[1]
    (base / "generation_config.json").unlink()
    hf.save_companions(hf.build_config(model), torch.bfloat16, tmp_path / "again", base)
    assert not (tmp_path / "again" / "generation_config.json").exists()


def test_a_chat_model_stops_where_its_template_ends_a_turn(tmp_path: Path, capsys: Any) -> None:
    """A base model whose end token is another one: greedy answers would run to the limit."""
    tokenizer = make_tokenizer(("</s>", "<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    base = filled(section("llama", vocab_size=len(tokenizer)))
    chats = recipe(data__train={"kind": "chat", "path": "x"}, training__objective="sft")
    with torch.no_grad():  # whatever it reads, it writes <|im_end|>
        for parameter in base.parameters():
            parameter.zero_()
        base.model.embed_tokens.weight[:] = -1.0
        base.model.embed_tokens.weight[ends] = 1.0
        base.model.norm.weight[:] = 1.0
        base.model.embed_tokens.weight[5] = 0.5
    base.save_pretrained(tmp_path)
    add_turn_ends(chats, tokenizer, tmp_path)
    assert "<|im_end|>" in capsys.readouterr().err
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.generation_config.eos_token_id == read.config.eos_token_id == [2, ends]
    answer = read.generate(torch.tensor([[5]]), max_new_tokens=9, do_sample=False)
    assert answer.tolist() == [[5, ends]]
    add_turn_ends(chats, tokenizer, tmp_path)
    assert "export:" not in capsys.readouterr().err, "once"
