"""What every rank of test_megatron_loading.py does: load a Hugging Face folder into TP2·PP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from toolkit.engines.distributed import join
from toolkit.engines.megatron.config import render_model
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.families import megatron_model
from toolkit.models.families.tensors import Block
from toolkit.models.megatron import cpu


def rectangles_read(folder: Path) -> list[Any]:
    """Tensor, rows and columns of whatever this rank reads."""
    join()
    cpu.before_import()
    from toolkit.models.megatron import model as megatron
    from toolkit.models.megatron import weights

    config = AutoConfig.from_pretrained(folder)
    source, asked = hf.pretrained_weights(folder, config), list[Block]()

    def read_block(block: Block, read: Callable[[Block], Tensor] = source.read_block) -> Tensor:
        asked.append(block)
        return read(block)

    source.read_block = read_block  # type: ignore[method-assign]
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    model = megatron_model(config.to_dict())
    megatron.join_groups(layout, seed=1)
    chunks = megatron.build_chunks(model, **render_model(model, layout, "fp32"), layout=layout)
    weights.fill(chunks, model, source)
    # A transposed block's rows are the file's columns.
    return [
        (block.tensor, block.columns, block.rows)
        if block.transposed
        else (block.tensor, block.rows, block.columns)
        for block in asked
    ]
