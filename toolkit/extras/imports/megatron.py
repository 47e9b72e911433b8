"""A Hugging Face folder as a checkpoint of Megatron-LM (`torch_dist`), and weights from one.

megatron-core's `dist_checkpointing` writes and reads it, for DMT's GPTModel on one rank: any
TP, PP and EP load the same checkpoint. That rank is a process of its own, without a GPU, and
needs memory for the whole model:

    python -m toolkit.extras.imports.megatron write HF_FOLDER MEGATRON_FOLDER
    python -m toolkit.extras.imports.megatron read MEGATRON_FOLDER HF_FOLDER PRECISION
"""

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from toolkit.errors import CheckpointError, DataError, DmtError
from toolkit.extras.imports.torch_dist import FORMAT_FILE, METADATA, Reader
from toolkit.models import huggingface as hf
from toolkit.models.families import FAMILIES, MegatronModel, megatron_model
from toolkit.models.families.tensors import Block
from toolkit.models.new_folder import appearing, check_destination
from toolkit.models.pretrained import SafetensorsWeights
from toolkit.models.safetensors import TensorToWrite, write_model
from toolkit.models.weights import is_correction_bias
from toolkit.recipe.schema import ModelSection
from toolkit.system.interpreter import python
from toolkit.text.terminal import tell

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
TRACKER = "latest_checkpointed_iteration.txt"
TITLE = "Megatron-LM torch_dist"
FILES = f"{METADATA} and {FORMAT_FILE}, of one iteration"
RELEASE = "release"
"""Megatron-LM's name for weights without a training step."""
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""3.0 is Megatron-LM's version with query, key and value in the order of our maps."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TRAINING_STATE = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|common_state|.*_extra_state"
)
"""Keys that are not weights. All others must belong to the model."""
_LARGEST_MULTIPLE = 128 * 64
"""Megatron-LM pads a vocabulary to at most this multiple: its default, times 64 tensor
ranks."""


def matches(folder: Path) -> bool:
    """Whether the folder is one iteration of megatron-core's."""
    return all((folder / name).is_file() for name in (METADATA, FORMAT_FILE))


def read_megatron(folder: Path, config: PretrainedConfig, dst: Path) -> list[str]:
    """Write the weights of a checkpoint as the Hugging Face folder `dst`, in the dtype of the
    embedding; what is to be said about them. Raises CheckpointError or DataError."""
    if config.model_type not in FAMILIES:
        raise CheckpointError(
            f"model.config.model_type: {config.model_type} has no map from "
            f"Megatron's tensors; known are {', '.join(sorted(FAMILIES))}"
        )
    nbytes = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    check_destination(folder, dst, nbytes)
    stored = Reader(folder).tensors
    if EMBEDDING not in stored:
        raise CheckpointError(f"{folder} has no {EMBEDDING}: it holds no GPTModel")
    dtype = stored[EMBEDDING].properties.dtype
    precision = next((name for name in DTYPES if DTYPES[name] == dtype), "fp32")
    with appearing(dst) as hidden:
        hf.save_companions(config, DTYPES[precision], hidden)
        return _in_a_process("read", folder, hidden, precision)


def write_megatron(source: Path, dst: Path) -> None:
    """Write the model of a Hugging Face folder into the new folder `dst`.

    Raises DataError for a model that megatron-core does not compute identically, and for
    weights that do not fit its config; CheckpointError where writing fails.
    """
    _, weights = _pretrained(source)
    dtypes = {
        weights.stored.part(name).get_dtype() for name in weights.files
        if not is_correction_bias(name) and name not in weights.buffers
    }  # fmt: skip
    if len(dtypes) > 1:
        raise DataError(
            f"{source}: its tensors are of {', '.join(sorted(dtypes))}; a Megatron checkpoint "
            "has one type",
            fix="save the model in one dtype first",
        )
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    check_destination(source, dst, nbytes)
    with appearing(dst) as hidden:
        _in_a_process("write", source, hidden)


def _pretrained(source: Path) -> tuple[MegatronModel, SafetensorsWeights]:
    """The model of a Hugging Face folder, and its weights. Raises DataError."""
    section = ModelSection(hub=str(source), init="pretrained")
    config = hf.build_config(section)
    model, weights = megatron_model(config.to_dict()), hf.weight_source(section, config, 0)
    assert isinstance(weights, SafetensorsWeights), "no rows are added"
    return model, weights


def _in_a_process(*words: str | Path) -> list[str]:
    """Carry out `main` in a process without a GPU. Return the lines that it prints. Raises
    CheckpointError."""
    command = [*python(), "-m", __name__, *map(str, words)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise CheckpointError(
            f"{words[1]}: megatron-core cannot {words[0]} it: {lines[-1][:400]}",
            fix="state its model in model.config" if words[0] == "read" else "",
        )
    return done.stdout.splitlines()


# --- in the process of its own ----------------------------------------------------------


def _build(model: MegatronModel, precision: str) -> Any:
    """megatron-core's model with random weights, on the CPU."""
    from toolkit.models.megatron import cpu

    cpu.before_import()
    # What saves; `cpu.redirect` must see it.
    from megatron.core.dist_checkpointing.strategies import (
        filesystem_async,  # noqa: F401
        state_dict_saver,  # noqa: F401
    )
    from megatron.core.dist_checkpointing.strategies import (
        torch as _,  # noqa: F401
    )

    from toolkit.layout import Layout
    from toolkit.models.megatron import model as megatron
    from toolkit.models.megatron.config import gpt_arguments, transformer_arguments

    layout = Layout()
    cpu.redirect()
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    megatron.join_groups(layout, seed=0)
    arguments = transformer_arguments(model, layout, precision)
    (chunk,) = megatron.build_chunks(model, arguments, gpt_arguments(model, layout), layout)
    return chunk


def write(source: Path, dst: Path) -> None:
    """Save a Hugging Face folder's model with megatron-core."""
    model, weights = _pretrained(source)
    embedding = weights.read(next(iter(weights.shapes)), 0, 1)
    chunk = _build(model, next(name for name in DTYPES if DTYPES[name] == embedding.dtype))
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from toolkit.models.megatron.weights import fill

    fill([chunk], model, weights)
    (dst / RELEASE).mkdir()
    saver = TorchDistSaveShardedStrategy("torch_dist", 1)
    state = {"model": chunk.sharded_state_dict(), **COMMON}
    dist_checkpointing.save(state, str(dst / RELEASE), saver)
    (dst / TRACKER).write_text(RELEASE)


def read(folder: Path, dst: Path, dtype: torch.dtype) -> None:
    """Load a checkpoint into megatron-core's model, and write it as safetensors next to the
    config in `dst`."""
    sizes = {key: one.size for key, one in Reader(folder).tensors.items()}
    config = hf.read_config(dst)
    model = megatron_model(config.to_dict())
    chunk = _build(model, "fp32")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    apart = any(".layers.0." in key for key in sizes)
    state = chunk.sharded_state_dict(
        metadata={"non_homogeneous_layers": True} if apart else None
    )
    # Objects (Transformer Engine's extra states) stay in the files.
    wanted = {name: one for name, one in state.items() if not isinstance(one, ShardedObject)}
    loaded, missing, unexpected = dist_checkpointing.load(
        {"model": wanted}, str(folder), TorchDistLoadShardedStrategy(), strict="return_all"
    )
    keys = {*missing, *unexpected}
    for note in _check_fit(folder, sizes, model.gpt["vocab_size"], keys):
        tell(note, sys.stdout)
    chunk.load_state_dict({**chunk.state_dict(), **loaded["model"]})
    parts: dict[str, list[tuple[Tensor, Block]]] = {}
    for values, block in _blocks(chunk, model):
        parts.setdefault(block.tensor, []).append((values, block))
    shapes = hf.checkpoint_shapes(config)
    write_model(
        dst,
        [
            TensorToWrite(name, kept, shape, partial(_whole, shape, parts[name], kept))
            for name, shape in shapes.items()
            for kept in [torch.float32 if is_correction_bias(name) else dtype]
        ],
    )


def _check_fit(
    folder: Path, sizes: Mapping[str, Sequence[int]], vocabulary: int, keys: Collection[str]
) -> Iterator[str]:
    """Return notes on what is left out. Raises CheckpointError for `keys` that only one side
    has. Also if more rows of the vocabulary than padding would be cut."""
    if wrong := sorted(key for key in keys if not _TRAINING_STATE.match(key)):
        where = f"it has {wrong[0]}" if wrong[0] in sizes else f"it has no {wrong[0]}"
        raise CheckpointError(f"{folder}: {where}, unlike the model")
    for key in (EMBEDDING, HEAD):
        rows = sizes.get(key, (vocabulary,))[0]
        if not 0 <= rows - vocabulary < _LARGEST_MULTIPLE:
            raise CheckpointError(
                f"{folder}: {key} has {rows} rows, vocab_size is {vocabulary}"
            )
        if rows > vocabulary:
            yield f"{rows - vocabulary} rows of padding in {key} are left out"


def _blocks(chunk: Any, model: MegatronModel) -> Iterator[tuple[Tensor, Block]]:
    """Every checkpoint rectangle, and the rows of a parameter that hold it."""
    from toolkit.models.megatron.weights import buffers, shards

    for shard in shards([chunk], model):
        row = 0
        for block in () if shard.shared else shard.blocks:
            rows = len(block.row_numbers)
            yield shard.parameter.detach()[row : row + rows], block
            row += rows
    yield from buffers([chunk], model)


def _whole(
    shape: tuple[int, ...], parts: list[tuple[Tensor, Block]], dtype: torch.dtype
) -> Iterator[Tensor]:
    """A checkpoint tensor from its rectangles, which are fp32."""
    whole = torch.empty(shape)
    for values, block in parts:
        stored = block.stored
        each, apart = stored.steps
        rectangle = whole[slice(*stored.rows)][::each]
        if stored.columns is not None:
            rectangle = rectangle[:, slice(*stored.columns)][:, ::apart]
        rectangle.copy_(values.T if block.transposed else values)
    yield whole.to(dtype)


def main() -> None:
    """Carry out a command line, without the teardown of process groups, which may abort."""
    verb, source, dst, *precision = sys.argv[1:]
    code = 0
    try:
        if verb == "write":
            write(Path(source), Path(dst))
        else:
            read(Path(source), Path(dst), DTYPES[precision[0]])
    except DmtError as error:
        tell(error.message)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # which megatron-core's writer leaves
        child.kill()
    os._exit(code)


if __name__ == "__main__":
    main()
