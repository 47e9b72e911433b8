"""Checks that a Hugging Face folder and a Megatron checkpoint compute the same logits.

    python -m toolkit.extras.convert.verify HF_FOLDER MEGATRON_FOLDER CONFIG_JSON

prints {"max_abs_difference", "largest_logit", "bound"} as its last line. It is a separate
program because megatron-core's process groups belong to a whole process, and because it must
not see a GPU: both models compute in fp32 on the CPU (CUDA_VISIBLE_DEVICES must be empty), one
after the other, so the machine needs room for the weights in fp32.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.models.agreement import TOKENS, Agreement, huggingface_logits, same_tokens


@torch.no_grad()
def megatron_logits(folder: Path, config: dict[str, object], tokens: Tensor) -> Tensor:
    """Logits of megatron-core's own model, loaded by megatron-core itself, padding cut off."""
    from toolkit.models.megatron import cpu

    cpu.before_import()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from toolkit.layout import Layout
    from toolkit.models.families import megatron_model
    from toolkit.models.megatron import model as megatron
    from toolkit.models.megatron.config import gpt_arguments, transformer_arguments

    layout = Layout()
    described = megatron_model(config)
    cpu.redirect()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    megatron.join_groups(layout, seed=0)
    (chunk,) = megatron.build_chunks(
        described,
        transformer_arguments(described, layout, "fp32"),
        gpt_arguments(described, layout),
        layout,
    )
    strategy = TorchDistLoadShardedStrategy()
    # Objects (TE's extra states) are left in the file: megatron-core would unpickle them.
    wanted = {
        name: part
        for name, part in chunk.sharded_state_dict().items()
        if not isinstance(part, ShardedObject)
    }
    state = dist_checkpointing.load({"model": wanted}, str(folder), strategy)
    chunk.load_state_dict({**chunk.state_dict(), **state["model"]})
    logits: Tensor = chunk.eval()(tokens, None, None)
    return logits[..., : described.gpt["vocab_size"]].float()


def main() -> None:
    """Compare, and print the result."""
    from toolkit.extras.convert.source import open_source

    hf_folder, megatron_folder, config_file = map(Path, sys.argv[1:4])
    source = open_source(megatron_folder, config_file)
    vocabulary = source.model.gpt["vocab_size"]
    length = min(TOKENS[1], source.model.gpt["max_sequence_length"])
    tokens = same_tokens(vocabulary, length)
    expected = huggingface_logits(hf_folder, tokens)
    gc.collect()
    found = megatron_logits(source.folder, source.config, tokens)
    print(json.dumps(asdict(Agreement.of(expected, found))), flush=True)
    sys.stderr.flush()
    # Interpreter teardown with process groups sometimes aborts.
    os._exit(0)


if __name__ == "__main__":
    main()
