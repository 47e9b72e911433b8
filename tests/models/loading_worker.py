"""What every rank of test_megatron_loading.py does: load a Hugging Face folder into TP2·PP2."""

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
from toolkit.models.weights import SafetensorsWeights


class Counted(SafetensorsWeights):
    """A source that remembers what was asked of it."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], prefix: str) -> None:
        super().__init__(folder, shapes, prefix)
        self.blocks: list[Block] = []

    def read_block(self, block: Block) -> Tensor:
        self.blocks.append(block)
        return super().read_block(block)


def rectangles_read(folder: Path) -> list[Any]:
    """Tensor, rows and columns of whatever this rank reads."""
    join()
    cpu.before_import()
    from toolkit.models.megatron import model as megatron
    from toolkit.models.megatron import weights

    config = AutoConfig.from_pretrained(folder)
    meta = hf.meta_model(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in meta.named_parameters()}
    source = Counted(folder, shapes, meta.base_model_prefix)
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
        for block in source.blocks
    ]
