"""Initial weights: layout-independent, with transformers' distributions, read exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.small import FAMILIES, filled, section
from toolkit.errors import DataError, PlanError
from toolkit.models import huggingface as hf
from toolkit.models.weights import BLOCK, RandomWeights
from toolkit.recipe.schema import ModelSection


@pytest.mark.parametrize("family", FAMILIES)
def test_distribution_is_that_of_transformers(family: str) -> None:
    model = filled(section(family))
    reference = AutoModelForCausalLM.from_config(model.config)
    ours = dict(model.named_parameters())
    for name, theirs in reference.named_parameters():
        sigma = theirs.std().item() if theirs.numel() > 1 else 0.0
        tolerance = 5 * sigma / theirs.numel() ** 0.5 + 1e-7
        assert abs(ours[name].mean() - theirs.mean()) < 2 * tolerance, name
        assert ours[name].std().item() == pytest.approx(sigma, abs=2 * tolerance), name
    for (name, ours_), (_, theirs) in zip(
        model.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert torch.equal(ours_, theirs), name


def test_any_range_equals_the_same_part_of_the_whole() -> None:
    config = hf.build_config(section("mixtral", vocab_size=5000))
    weights = RandomWeights(hf.meta_model(config), seed=3)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"):
        numel = torch.Size(weights.shapes[name]).numel()
        whole = weights.read(name, 0, numel)
        for start, stop in [(0, 1), (17, numel - 5), (numel // 3, numel // 2)]:
            assert torch.equal(weights.read(name, start, stop), whole[start:stop])
    assert BLOCK < 5000 * 64, "the test must cross a block's edge"


def test_seed_and_name_change_the_weights() -> None:
    first, second = filled(section("llama"), seed=1), filled(section("llama"), seed=2)
    layers = first.model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)
    assert not torch.equal(first.model.embed_tokens.weight, second.model.embed_tokens.weight)


def test_golden_values() -> None:
    """The stream is part of every published result: it must never change."""
    config = hf.build_config(section("llama"))
    values = RandomWeights(hf.meta_model(config), 1234).read("model.embed_tokens.weight", 0, 3)
    golden = [-0.027387375, 0.0144555205, -0.0178156868]
    assert values.tolist() == pytest.approx(golden, abs=1e-9)


def test_padding_row_is_zero() -> None:
    model = filled(section("llama", pad_token_id=0, tie_word_embeddings=False))
    assert not model.model.embed_tokens.weight[0].any()
    assert model.model.embed_tokens.weight[1].any()


def saved(folder: Path, **changes: Any) -> ModelSection:
    """A recipe's model that starts from a small llama in `folder`."""
    filled(section("llama", **changes)).save_pretrained(folder)
    return ModelSection(hub=str(folder), init="pretrained")


def test_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    section_ = saved(tmp_path)
    config = hf.build_config(section_)
    config.num_hidden_layers = 3
    with pytest.raises(DataError, match=r"no tensor model\.layers\.2"):
        hf.weight_source(section_, config, 1)


@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.bfloat16, torch.nan), (torch.float16, torch.inf)]
)
def test_checkpoint_that_is_not_finite_is_refused(
    dtype: torch.dtype, bad: float, tmp_path: Path
) -> None:
    filled(section("llama")).to(dtype).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = torch.finfo(
        dtype
    ).max  # finite, though its sum is not
    tensors["model.norm.weight"][-1] = bad
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    section_ = ModelSection(hub=str(tmp_path), init="pretrained")
    source = hf.weight_source(section_, hf.build_config(section_), 1)
    source.read("model.embed_tokens.weight", 0, 100)
    with pytest.raises(DataError, match=r"model\.safetensors: model\.norm\.weight holds NaN"):
        source.read("model.norm.weight", 0, tensors["model.norm.weight"].numel())


@pytest.mark.parametrize("indexed", [False, True])
def test_checkpoint_that_holds_more_than_the_model_is_refused(
    indexed: bool, tmp_path: Path
) -> None:
    """transformers drops it with a warning."""
    section_ = saved(tmp_path)
    config = hf.build_config(section_)
    config.num_hidden_layers = 1
    if indexed:  # the layer is in a file that the index names, but not in the index
        file = tmp_path / "model.safetensors"
        names = [name for name in load_file(file) if "layers.1" not in name]
        index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
        file.rename(tmp_path / "part.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        DataError, match=r"holds model\.layers\.1.* and 6 more, which the model does"
    ):
        hf.weight_source(section_, config, 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_head_that_the_checkpoint_stores_as_another_is_refused(
    family: str, tmp_path: Path
) -> None:
    """transformers would not tie it: silently another model."""
    model = filled(section(family))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    section_ = ModelSection(hub=str(tmp_path), init="pretrained")
    loaded = hf.build_config(section_)
    hf.weight_source(section_, loaded, 1)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lm_head\.weight is not the same"):
        hf.weight_source(section_, loaded, 1)


def test_a_published_attention_implementation_decides_nothing(tmp_path: Path) -> None:
    """Some tools write it into config.json; the package may be missing."""
    section_, file = saved(tmp_path), tmp_path / "config.json"
    published = json.loads(file.read_text()) | {"attn_implementation": "flash_attention_2"}
    file.write_text(json.dumps(published))
    hf.weight_source(section_, hf.build_config(section_), 1)


def test_pickled_checkpoint_is_not_read(tmp_path: Path) -> None:
    model = filled(section("llama"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    section_ = ModelSection(hub=str(tmp_path), init="pretrained")
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        hf.weight_source(section_, hf.build_config(section_), 1)


def test_recipe_that_disagrees_with_the_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    stated = {"model_type": "llama", "num_hidden_layers": 5}
    with pytest.raises(PlanError, match=r"num_hidden_layers: the recipe has 5.*has 2"):
        hf.build_config(ModelSection(hub=str(tmp_path), init="pretrained", config=stated))


def test_recipe_may_state_what_the_checkpoint_says(tmp_path: Path) -> None:
    """transformers keeps `rope_theta` and `rope_scaling` under another name."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    section_ = section("llama", rope_theta=5e5, rope_scaling=scaling)
    hf.build_config(section_).save_pretrained(tmp_path)
    pretrained = {"hub": str(tmp_path), "init": "pretrained"}
    assert hf.build_config(section_.model_copy(update=pretrained)).rope_parameters == {
        **scaling,
        "rope_theta": 5e5,
    }


def test_recipe_that_leaves_out_a_part_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """What is not stated was planned with transformers' default."""
    section_ = section("llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    hf.build_config(section_).save_pretrained(tmp_path)
    assert section_.config is not None
    for left_out, named in (("rope_scaling", "rope_theta"), ("num_hidden_layers", "layers")):
        stated = {k: v for k, v in section_.config.items() if k != left_out}
        if left_out == "rope_scaling":
            stated["rope_theta"] = 10000.0
        with pytest.raises(PlanError, match=named):
            hf.build_config(ModelSection(hub=str(tmp_path), init="pretrained", config=stated))


def test_a_recipe_may_raise_the_positions_of_a_pretrained_model(tmp_path: Path) -> None:
    """Only those that are no weights and change no frequencies; the export has them."""
    scaled = section("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for number, one in enumerate((section("llama"), scaled, section("gpt2"))):
        base = tmp_path / str(number)
        filled(one).save_pretrained(base)
        stated = {**(one.config or {}), "max_position_embeddings": 128}
        raised = ModelSection(hub=str(base), init="pretrained", config=stated)
        if number:
            with pytest.raises(PlanError, match="a copy of its folder with an edited config"):
                hf.build_config(raised)
            continue
        config = hf.build_config(raised)
        (tmp_path / "export").mkdir()
        hf.save_companions(config, torch.float32, tmp_path / "export", base, stated)
        exported = json.loads((tmp_path / "export/config.json").read_text())
        assert config.max_position_embeddings == exported["max_position_embeddings"] == 128


def test_dropout_is_off_unless_the_recipe_sets_it() -> None:
    assert hf.build_config(section("gpt2")).resid_pdrop == 0.0
    assert hf.build_config(section("gpt2", resid_pdrop=0.2)).resid_pdrop == 0.2
