"""`launch/examples/trl_trainer.py` trains sharded what TRL trains in one plain process."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.accelerate.examples_worker import ENGINES, forget, script
from tests.data.chat.families import TEMPLATES
from tests.forked import run_ranks
from tests.processes import ROOT
from toolkit.accelerate import training_arguments
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.errors import PlanError
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT
]

TINY = ROOT / "recipes" / "tiny"
ROWS = {"sft": "docstrings.jsonl", "dpo": "docstrings-preferences.jsonl"}
SHARDED = {"sft": "zero3", "dpo": "zero2"}
RATE, STEPS, BATCH, LENGTH, BETA, SEED = 1e-2, 4, 8, 192, 0.2, 7
EPS = 1e-5
"""Of AdamW: large enough that an element whose gradient is nearly 0 hardly moves."""
RECIPE = f"""
model:
  hub: ./start
  init: pretrained
  config: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}}
training:
  steps: {STEPS}
  sequence_length: {LENGTH}
  global_batch_size: {BATCH}
  micro_batch_size: 2
  seed: {SEED}
optimizer: {{learning_rate: {RATE}, weight_decay: 0.0, eps: {EPS}}}
schedule: {{name: constant, warmup_steps: 0}}
evaluation: {{every_steps: null}}
adapter: {{rank: 8, alpha: 16}}
"""
LOGGED: dict[str, Any] = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes with their data, and the model that both begin with."""
    folder = tmp_path_factory.mktemp("trl-example")
    template = TEMPLATES / "chatml_generation.jinja"
    for objective, name in ROWS.items():
        rows = (TINY / name).read_text(encoding="utf-8").splitlines()
        (folder / f"{objective}.jsonl").write_text("\n".join(rows[: STEPS * BATCH * 2]))
        data = f"train: {{path: ./{objective}.jsonl}}, chat_template: {template}, packing: none"
        text = f"extends: {TINY}/llama-{objective}.yaml{RECIPE}data: {{{data}}}\n"
        text += f"dpo: {{beta: {BETA}}}\n" if objective == "dpo" else ""
        (folder / f"{objective}.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(folder / "sft.yaml", ["model.init=random", "model.hub=null"])
    config = hf.build_config(recipe.model)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(recipe.model, config, SEED))
    model.save_pretrained(folder / "start")
    return folder


def plain(folder: Path) -> dict[str, list[float]]:
    """TRL's losses in one process, with arguments, model and adapters of a user's own."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, set_seed
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    warnings.simplefilter("ignore")
    chosen = {
        "sft": (SFTTrainer, SFTConfig, {"assistant_only_loss": True}),
        "dpo": (DPOTrainer, DPOConfig, {"beta": BETA}),
    }
    losses = {}
    for objective, (trainer, config_class, own) in chosen.items():
        arguments = config_class(
            output_dir=str(folder / f"{objective}-plain"), per_device_train_batch_size=BATCH,
            learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, seed=SEED,
            adam_beta2=0.95, adam_epsilon=EPS, max_grad_norm=1.0, max_length=LENGTH,
            bf16=False, use_cpu=True, gradient_checkpointing=False, **own, **LOGGED,
        )  # fmt: skip
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = (TEMPLATES / "chatml_generation.jinja").read_text()
        rows = str(folder / f"{objective}.jsonl")
        set_seed(SEED)
        losses[objective] = train(
            trainer(
                model=AutoModelForCausalLM.from_pretrained(folder / "start"),
                args=arguments,
                train_dataset=load_dataset("json", data_files=rows, split="train"),
                processing_class=tokenizer,
                peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            )
        )
    return losses


def sharded(folder: Path) -> dict[str, list[float]]:
    """The example's losses, for each objective."""
    warnings.simplefilter("ignore")
    example = script("trl_trainer")
    # The functions' own names: run_path returns a copy of them.
    example["make_trainer"].__globals__["training_arguments"] = recreated
    losses = {}
    for objective, engine in SHARDED.items():
        recipe = load_recipe(folder / f"{objective}.yaml", ENGINES[engine])
        example["check"](recipe)
        output = str(folder / f"{objective}-sharded")
        trainer = example["make_trainer"](recipe, output_dir=output, **LOGGED)
        losses[objective] = train(trainer)
        assert f"zero{trainer.model_wrapped.zero_optimization_stage()}" == engine
        forget()
    return losses


def recreated(recipe: Any, *, config_class: Any, **more: Any) -> Any:
    """A recipe's arguments, created from their fields, as TRL and other scripts do."""
    first = training_arguments(recipe, config_class=config_class, **more)
    stated = {key: value for key, value in first.to_dict().items() if "token" not in key}
    del first
    return config_class(**stated)


def train(trainer: Any) -> list[float]:
    """Train and save."""
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_and_adapters_are_those_of_one_plain_process(folder: Path) -> None:
    expected = run_ranks(plain, 1, folder)[0]
    found = run_ranks(sharded, 2, folder)[0]
    for objective, losses in expected.items():
        assert len(losses) == STEPS and losses[-1] != pytest.approx(losses[0], rel=1e-2)
        assert found[objective] == pytest.approx(losses, rel=1e-5)
        adapter, wanted = (
            load_file(folder / f"{objective}-{run}" / "adapter_model.safetensors")
            for run in ("sharded", "plain")
        )
        assert adapter.keys() == wanted.keys() and all(t.any() for t in adapter.values())
        for key, tensor in wanted.items():
            torch.testing.assert_close(adapter[key], tensor, rtol=1e-3, atol=1e-4)


REFUSED = {
    "training.objective": "pretrain",
    "model.init": "random",
    "data.packing": "greedy",
    "data.train.columns": "{messages: talk}",
    "data.train.loss_on": "last_assistant",
    "dpo.label_smoothing": "0.1",
    "dpo.sft_weight": "1.0",
}


def test_what_the_script_does_not_know_is_refused(folder: Path) -> None:
    check = script("trl_trainer")["check"]
    text = "data={train: {kind: text, files: ['*.jsonl']}, chat_template: null}"
    for key, value in REFUSED.items():
        changes = [f"{key}={value}", *([text] if key == "training.objective" else [])]
        with pytest.raises(PlanError, match="this script does not know") as caught:
            check(load_recipe(folder / f"{'dpo' if 'dpo' in key else 'sft'}.yaml", changes))
        assert f"set {key} to" in (caught.value.fix or "")
