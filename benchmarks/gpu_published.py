"""The dress rehearsal's peak beside published ones.

    python benchmarks/gpu_published.py CASES.json

Of the cases, those with a peak that the engines can express: torchtitan's eager runs (what
they reserve, in segments of the allocator's default; their recompute of every second product is
put around the layers here), and Megatron's with sequence parallelism and selective recompute
(what is allocated, on the first stage). Runs with torch.compile or Transformer Engine are left
out.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.rehearse.gpu import guard

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Expressed:
    """A published run as a recipe."""

    recipe: str
    overrides: list[str]
    change: Callable[[Any], None]
    """What is done to the engine before it trains."""
    reported: str
    """What is published: `allocated` or `reserved`."""


def expressed(case: dict[str, Any]) -> Expressed | None:
    """None for what the engines cannot express."""
    layout, batch, model = case["layout"], case["batch"], case["model"]
    selective = str(layout["recompute"]).startswith("selective")
    common = [
        f"training.global_batch_size={batch['global']}",
        f"training.micro_batch_size={batch['micro']}",
        f"training.sequence_length={model['seq']}",
        f"cluster.nodes={max(1, case['hardware']['n_gpus'] // 8)}",
        "cluster.gpus_per_node=8",
        "cluster.gpu=h100-80gb",
        "kernels.loss=whole",
    ]
    if case["source"] == "torchtitan" and "eager" in case["notes"]:
        parallel = ["engine=fsdp", "zero.stage=3", "recompute=none"]
        parallel += ["zero.offload_optimizer=none", "zero.offload_parameters=none"]
        settings = [*common, *(f"parallel.{one}" for one in parallel)]
        recipe = "llama/llama-3.1-8b-pretrain.yaml"
        return Expressed(recipe, settings, every_second_product, "reserved")
    if case["source"] != "korthikanti_mem" or not (selective and layout.get("sp")):
        return None
    parallel = {
        "engine": "megatron",
        "tensor": layout["tp"],
        "pipeline": layout["pp"],
        "virtual_pipeline": layout["vpp"],
        "zero.stage": 0,
        "recompute": "selective",
        "sequence": "true",
    }
    config = {
        "n_layer": model["layers"],
        "n_embd": model["hidden"],
        "n_head": model["heads"],
        "vocab_size": model["vocab"],
        "n_positions": model["seq"],
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    settings = [
        *common,
        *(f"parallel.{key}={value}" for key, value in parallel.items()),
        *(f"model.config.{key}={value}" for key, value in config.items()),
    ]
    return Expressed("gpt2/gpt2-124m-pretrain.yaml", settings, lambda _: None, "allocated")


def every_second_product(engine: Any) -> None:
    """torchtitan's selective recompute: attention and every second product are kept."""
    import torch
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    from toolkit.models.huggingface import decoder_layers

    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    product = torch.ops.aten.mm.default

    def contexts() -> Any:
        counts: dict[bool, int] = defaultdict(int)

        def policy(context: Any, func: Any, *_: object, **__: object) -> CheckpointPolicy:
            again = context.is_recompute
            counts[again] += func is product
            if func is attention or (func is product and counts[again] % 2):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for layer in decoder_layers(engine.model):
        forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        layer.forward = forward


def main() -> None:
    """Rehearse every case that can be expressed; one process each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--only", default="", help="cases whose id has this in it")
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"  # as in the published runs
    guard.load()
    mode = import_module("toolkit.rehearse.gpu.device").pretend()
    errors = []
    for case in cases:
        published = case["reported"].get("mem_gb_per_gpu")
        found = expressed(case) if published else None
        if found is None:
            continue
        if options.only not in case["id"]:
            continue
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, json.dumps(rehearsed(found, mode)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            gib = {key: size / 2**30 for key, size in json.load(file).items()}
        os.wait()
        error = gib[found.reported] / published - 1
        errors.append(abs(error))
        sizes = "  ".join(f"{name} {size:6.2f}" for name, size in gib.items())
        print(f"{error:+6.1%} of {published:6.2f}  {sizes}  {case['id']}", flush=True)
    print(f"mean of {len(errors)}: {sum(errors) / len(errors):.1%}")


def rehearsed(found: Expressed, mode: Any) -> dict[str, int]:
    """Bytes of a step on the first rank."""
    from toolkit.intake.load import load_recipe
    from toolkit.rehearse.gpu.dress import DressRehearsal
    from toolkit.rehearse.gpu.findings import STEP
    from toolkit.rehearse.gpu.rank import rehearse
    from toolkit.run.assignment import decide

    planned = decide(load_recipe(RECIPES / found.recipe, found.overrides), None)
    rehearsal = DressRehearsal.of(planned)
    skipped = ("step", "evaluate")
    done = rehearse(rehearsal.assignment, 0, mode, found.change, skip=skipped)
    allocated = done.peaks[STEP].nbytes
    return {"allocated": allocated, "reserved": done.reserved, "least": done.least}


if __name__ == "__main__":
    main()
