"""TRL's SFTTrainer trains sharded by the arguments of a recipe, and saves what it trained.

It creates the arguments that it is given again, from their fields. A plain Trainer keeps them.
"""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.accelerate.examples_worker import ENGINES
from tests.accelerate.trl_ranks import CLIENTS, RATE, WARMUP, Seen, plain, sharded
from tests.e2e.conftest import WORDS, Project
from tests.forked import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT
]

SFT = f"""
extends: finetune.yaml
optimizer: {{learning_rate: {RATE}}}
schedule: {{name: cosine, warmup_steps: {WARMUP}, min_learning_rate: {RATE / 10}}}
"""


@pytest.fixture(scope="module")
def folder(finetune: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a tokenizer."""
    folder = tmp_path_factory.mktemp("trl")
    for name in ("start", "data"):
        shutil.copytree(finetune.folder / name, folder / name)
    for name in ("recipe.yaml", "finetune.yaml"):
        shutil.copy(finetune.folder / name, folder)
    (folder / "sft.yaml").write_text(SFT, encoding="utf-8")
    words = Tokenizer(WordLevel({w: n for n, w in enumerate(("<pad>", "<end>", *WORDS))}))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder / "start")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Seen]:
    """The plain SFTTrainer on one process."""
    return run_ranks(plain, 1, folder)[0]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Seen]:
    """Every client on two processes."""
    return run_ranks(sharded, 2, folder)[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", CLIENTS)
def test_sft_trains_sharded(
    client: str, engine: str, found: dict[str, Seen], expected: dict[str, Seen]
) -> None:
    seen = found[f"{client}-{engine}"]
    assert seen["kind"] == engine
    assert 0.5 <= seen["share"] < 0.52, "of the numbers, on each of two ranks"
    assert seen["losses"] == pytest.approx(expected[client]["losses"], rel=1e-5)


@pytest.mark.usefixtures("found", "expected")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", CLIENTS)
def test_sft_saves_what_it_trained(client: str, engine: str, folder: Path) -> None:
    """Every number of the model, or of the adapter, as the plain trainer has it."""
    saved = folder / f"{client}-{engine}"
    first = AutoModelForCausalLM.from_pretrained(folder / "start")
    if client == "lora":
        found = load_file(saved / "adapter_model.safetensors")
        expected = load_file(folder / "lora-plain" / "adapter_model.safetensors")
        assert len(expected) == 8 and all(tensor.any() for tensor in expected.values())
        PeftModel.from_pretrained(first, saved)
    else:
        model = AutoModelForCausalLM.from_pretrained(saved)
        found = model.state_dict()
        expected = AutoModelForCausalLM.from_pretrained(folder / "full-plain").state_dict()
        assert not torch.equal(found["lm_head.weight"], first.state_dict()["lm_head.weight"])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_trainer_has_every_schedule_under_deepspeed(found: dict[str, Seen]) -> None:
    low = RATE / 10
    expected = {
        "constant": [0.0, RATE / 2, RATE, RATE],
        "linear": [0.0, RATE / 2, RATE, (RATE + low) / 2],
        "cosine": [0.0, RATE / 2, RATE, (RATE + low) / 2],
        "wsd": [low, (RATE + low) / 2, RATE, (RATE + low) / 2],
    }
    for name, rates in expected.items():
        seen = found[name]
        assert seen["rates"] == pytest.approx(rates), name
        assert (seen["kind"], seen["clipping"]) == ("zero2", 1.8)
        assert (seen["micro batch"], seen["accumulation"]) == (2, 2)


def test_a_users_own_arguments_take_precedence(found: dict[str, Seen]) -> None:
    seen = found["overruled"]
    assert seen["rates"] == pytest.approx([0.0, 2 * RATE, RATE * 5 / 3, RATE * 4 / 3])
    assert (seen["kind"], seen["clipping"]) == ("zero2", 0.5)
    assert (seen["micro batch"], seen["accumulation"]) == (1, 3)
