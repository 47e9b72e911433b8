"""What every rank of the tests does: train presets, and read them, as a user would."""

import os
import runpy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import deepspeed.ops
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

STEPS = 3
MICRO_BATCH = 2
ACCUMULATION = 2
LEARNING_RATE = 1e-2
VOCABULARY = 4096


def model() -> LlamaForCausalLM:
    """A small llama; to be swapped to disk, one whose embedding is large enough for that."""
    set_seed(7)
    swapped = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH" in os.environ
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512 if swapped else 64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def samples() -> list[dict[str, torch.Tensor]]:
    """The same sequences at every step, so that the loss must fall."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(
        0,
        VOCABULARY,
        (MICRO_BATCH * ACCUMULATION * int(os.environ["WORLD_SIZE"]), 16),
        generator=generator,
    )
    return [{"input_ids": row, "labels": row} for row in ids.repeat(STEPS, 1)]


def with_trainer(file: Path) -> list[float]:
    """`TrainingArguments(deepspeed=FILE)`."""
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Without a GPU, Trainer sees several DeepSpeed processes only when they are set up.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=str(file),
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=samples())
    trainer.train()
    unset_hf_deepspeed_config()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses(files: Sequence[Path]) -> dict[str, list[float]]:
    """The loss of each step under each preset, by its name."""
    warnings.simplefilter("ignore")
    # DeepSpeed would compile its shared-memory all-reduce first (ds_configs/README.md).
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    result = {}
    for file in files:
        result[file.stem] = with_trainer(file)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
    return result


def filled_by_both(files: Sequence[Path], folder: str) -> dict[str, list[tuple[int, bool]]]:
    """Stage, and whether weights are quantized, as DeepSpeed reads what the Trainer and what
    Accelerate make of each file."""
    from accelerate import DeepSpeedPlugin
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    warnings.simplefilter("ignore")
    arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=True, report_to=[])
    found = {}
    for file in files:
        hf = HfTrainerDeepSpeedConfig(str(file))
        hf.trainer_config_process(arguments)
        accelerate = DeepSpeedPlugin(hf_ds_config=str(file), gradient_accumulation_steps=1)
        accelerate.set_mixed_precision("bf16")
        accelerate.deepspeed_config_process(
            must_match=False, gradient_clipping=1.0, train_batch_size=4,
            train_micro_batch_size_per_gpu=4,
        )  # fmt: skip
        accelerate.deepspeed_config["steps_per_print"] = 1
        found[file.stem] = []
        for config in (hf.config, accelerate.deepspeed_config):
            left = str(config).replace("nvme_path': 'auto", "")
            assert "auto" not in left, config
            read = DeepSpeedConfig(config)
            assert read.bfloat16_config.enabled and not read.float16_config.enabled
            assert read.gradient_clipping == 1.0
            zero = read.zero_config
            found[file.stem].append((int(zero.stage), bool(zero.zero_quantized_weights)))
    return found


def run_script(script: Path) -> None:
    """A user's script."""
    runpy.run_path(str(script), run_name="__main__")
