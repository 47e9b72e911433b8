"""Attention at length on CPUs: peak memory and time.

    python benchmarks/context.py [--out benchmarks/results/…json]

Each figure of memory is the peak resident memory of a process of its own during one forward and
backward pass, less what it had before.

- `ring`: a llama of two layers on one row of 16,384 tokens, in one process and on each of four
  ranks with `kernels.context: ring`;
- `documents`: attention inside 32 documents in a row of 16,384 tokens, document by document and
  with a mask of rows and columns;
- `speed`: the same with 16 documents in 4,096 tokens, in alternating pairs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from toolkit.batch import MicroBatch
from toolkit.layout import Layout
from toolkit.models import documents
from toolkit.models.context import Context
from toolkit.models.documents import Scores

MIB = 2**20
LENGTH = 16_384
RANKS = 4
PAIRS = 5


def peak_mib(compute: Callable[[], object]) -> float:
    """Peak resident memory that `compute` adds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    compute()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - pages * resource.getpagesize()) / MIB


def attention(length: int, count: int, mode: str) -> Callable[[], None]:
    """One forward and backward pass of attention inside `count` equal documents."""
    q, k, v = (torch.randn(1, length, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    each = length // count
    ends = torch.arange(count + 1, dtype=torch.int32) * each

    def by_document() -> Tensor:
        return documents.attend(q, k, v, ends, ends, Scores())

    def with_mask() -> Tensor:
        place = torch.arange(length)
        sees = (place[:, None] >= place) & (place[:, None] // each == place // each)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, attn_mask=sees, enable_gqa=True)
        return out.transpose(1, 2)

    forward = with_mask if mode == "mask" else by_document
    return lambda: forward().sum().backward()


def ring(ranks: int) -> float:
    """Of the llama, on this rank of `ranks`."""
    from transformers import AutoConfig

    from toolkit.models import huggingface as hf

    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = documents.IMPLEMENTATION
    model = hf.new_model(config, torch.float32)
    context = None
    if ranks > 1:
        dist.init_process_group("gloo")
        layout = Layout(cp=ranks, exchange="ring")
        context = Context.of(layout, key_heads=2)

    def step(length: int) -> None:
        tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(0))
        batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
        hf.log_probs(model, batch, context).sum().backward()

    step(256)  # the gradients, and what libraries allocate once
    return peak_mib(lambda: step(LENGTH))


def measured(what: str, ranks: int = 1) -> float:
    """The figure of a process of its own; of several, the largest."""
    command = [sys.executable, __file__, "--measure", what]
    env = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started)
    return max(float(output) for output in outputs)


def speed() -> dict[str, object]:
    """Seconds of alternating passes, after one of each."""
    passes = {mode: attention(4096, 16, mode) for mode in ("mask", "documents")}
    seconds: dict[str, list[float]] = {mode: [] for mode in passes}
    for number in range(PAIRS + 1):
        for mode, compute in passes.items():
            started = time.perf_counter()
            compute()
            if number:
                seconds[mode].append(round(time.perf_counter() - started, 4))
    medians = {mode: statistics.median(x) for mode, x in seconds.items()}
    return {**seconds, "times": medians["mask"] / medians["documents"]}


def main() -> None:
    """Print all figures, or one of this process's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure")
    parser.add_argument("--only", choices=("ring", "documents", "speed"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(1)
        if arguments.measure == "ring":
            print(ring(int(os.environ["WORLD_SIZE"])))
        else:
            attention(256, 4, arguments.measure)()  # what libraries allocate once
            print(peak_mib(attention(LENGTH, 32, arguments.measure)))
        return
    figures: dict[str, object] = {"torch": torch.__version__}
    asked = arguments.only
    if asked in (None, "speed"):
        figures["speed, 4,096 tokens, 16 documents"] = speed()
    if asked in (None, "documents"):
        mask, by_document = measured("mask"), measured("documents")
        share = by_document / mask
        figures["MiB, 16,384 tokens, 32 documents"] = [mask, by_document, share]
    if asked in (None, "ring"):
        alone, each = measured("ring"), measured("ring", RANKS)
        figures["MiB, 16,384 tokens, one process and a rank of 4"] = [alone, each, each / alone]
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
