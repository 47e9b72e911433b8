"""What every rank of the tests does: train presets as a user of the named library would."""

import os
import runpy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import deepspeed.ops
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader
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


def with_accelerate(file: Path) -> list[float]:
    """`deepspeed_config_file: FILE`, bf16, with the optimizer in the script."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    accelerator = Accelerator(
        mixed_precision="bf16",
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config=str(file), gradient_accumulation_steps=ACCUMULATION
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    network = model()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    loader = DataLoader(samples(), batch_size=MICRO_BATCH)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(network):
            loss = network(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return [
        sum(losses[start : start + ACCUMULATION]) / ACCUMULATION
        for start in range(0, len(losses), ACCUMULATION)
    ]


def losses(library: str, files: Sequence[Path]) -> dict[str, list[float]]:
    """The loss of each step under each preset, by its name."""
    warnings.simplefilter("ignore")
    # DeepSpeed would compile its shared-memory all-reduce first (ds_configs/README.md).
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    train = {"trainer": with_trainer, "accelerate": with_accelerate}[library]
    result = {}
    for file in files:
        result[file.stem] = train(file)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
    return result


def run_script(script: Path) -> None:
    """A user's script."""
    runpy.run_path(str(script), run_name="__main__")
