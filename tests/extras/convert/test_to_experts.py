"""`dmt convert --to-experts`: the mixture computes the dense model's function."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.extras.convert.converting import change_config, tensors_of
from tests.models.configs import config_of
from tests.models.in_megatron import save_random_model
from toolkit.cli.main import main

TOKENS = torch.arange(48).view(2, 24) % 61


def upcycled(config: dict[str, Any], folder: Path, *more: str) -> tuple[Any, Any]:
    """The dense model and its mixture, both by transformers."""
    save_random_model(config, folder / "dense")
    (folder / "dense" / "tokenizer.json").write_text("{}")
    stated = json.loads((folder / "dense" / "config.json").read_text())
    if stated["rope_parameters"].get("rope_theta") == 10000.0:  # the families' defaults differ
        del stated["rope_parameters"]
        (folder / "dense" / "config.json").write_text(json.dumps(stated))
    words = ["convert", f"{folder}/dense", f"{folder}/mixture", "--to-experts", "4", *more]
    assert main(words) == 0
    loaded = (AutoModelForCausalLM.from_pretrained(folder / n) for n in ("dense", "mixture"))
    dense, mixture = (model.float().eval() for model in loaded)
    return dense, mixture


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3"])
def test_logits_are_the_dense_models(case: str, tmp_path: Path) -> None:
    dense, mixture = upcycled(config_of(case), tmp_path)
    assert mixture.config.model_type == {"qwen3": "qwen3_moe"}.get(case, "mixtral")
    with torch.no_grad():
        wanted, found = (model(TOKENS).logits for model in (dense, mixture))
    assert (found - wanted).abs().max() <= 1e-5
    assert wanted.std() > 1e-3
    assert (tmp_path / "mixture" / "tokenizer.json").read_text() == "{}"
    routers = [
        t for name, t in tensors_of(tmp_path / "mixture").items() if "gate.weight" in name
    ]
    assert len(routers) == dense.config.num_hidden_layers
    assert not torch.equal(routers[0], routers[1])


def test_the_seed_draws_the_routers(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate("112"):
        upcycled(config_of("llama"), tmp_path / str(number), "--seed", seed)
        found.append(tensors_of(tmp_path / str(number) / "mixture"))
    same = {name for name in found[0] if torch.equal(found[0][name], found[1][name])}
    assert same == found[0].keys()
    other = {name for name in found[0] if not torch.equal(found[0][name], found[2][name])}
    assert other == {name for name in found[0] if name.endswith("moe.gate.weight")}


@pytest.mark.parametrize(
    ("case", "changes", "told"),
    [
        ("gpt2", {}, "needs a Hugging Face folder of llama, mistral, qwen3, not gpt2"),
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            "mixtral cannot have attention_bias: True",
        ),
    ],
)
def test_refused(
    case: str, changes: dict[str, Any], told: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    save_random_model(config_of(case), tmp_path / "dense")
    change_config(tmp_path / "dense", **changes)
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["model_type"] == case
    words = ["convert", f"{tmp_path}/dense", f"{tmp_path}/out", "--to-experts", "4"]
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert main([*words, "--verify"]) == 2
