"""The planner's memory beside the dress rehearsal's, over many layouts.

    python benchmarks/gpu_memory.py --out FILE [--only PATTERN] [--again]

FILE keeps what was rehearsed, so that the planner can be compared with it again in seconds;
only what is missing in it is rehearsed (`--again`: everything). Ranks of the first and the last
pipeline stage run one after the other, forked from one process that has imported all.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.rehearse.gpu import guard

RECIPES = Path(__file__).parents[1] / "recipes"
LLAMA_1B, LLAMA_3B = "llama/llama-3.2-1b-pretrain", "llama/llama-3.2-3b-pretrain"
LLAMA_8B, LLAMA_70B = "llama/llama-3.1-8b-pretrain", "llama/llama-3.1-70b-pretrain"
QWEN_8B, QWEN_32B = "qwen/qwen3-8b-pretrain", "qwen/qwen3-32b-pretrain"
QWEN_MOE, MIXTRAL = "qwen/qwen3-30b-a3b-pretrain", "mistral/mixtral-8x7b-pretrain"
PYTHIA, GPT2 = "pythia/pythia-1.4b-pretrain", "gpt2/gpt2-124m-pretrain"
MISTRAL, OLMO = "mistral/mistral-7b-pretrain", "olmo/olmo-3-7b-pretrain"
GPT_OSS, GEMMA_2 = "gpt-oss/gpt-oss-20b-pretrain", "gemma-2-2b"
SHAPES: dict[str, tuple[str, str]] = {
    # google/gemma-2-2b's config.json; what it leaves out is the family's default.
    GEMMA_2: (
        LLAMA_1B,
        "{model_type: gemma2, vocab_size: 256000, hidden_size: 2304, intermediate_size: 9216, "
        "num_hidden_layers: 26, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 256}",
    ),
}
"""Models without a recipe: another model's recipe, and their config."""
OFFLOADED, ON_HOST = "zero.offload_optimizer=cpu", "zero.offload_parameters=cpu"
LENGTHS = {"mistral/mixtral-8x7b-pretrain": 8192, GPT_OSS: 4096, GEMMA_2: 4096}
"""Tokens of a sequence where it is not the recipe's."""

Case = tuple[str, int, int, str]
"""Recipe, nodes of eight H100 (or `gpus`), size of a micro batch, settings of `parallel`, and
the rank of an `adapter` and tokens of a sequence (`length`)."""
ALONE = (
    f"deepspeed zero.stage=3 {OFFLOADED} {ON_HOST} gpus=1",
    f"deepspeed zero.stage=3 {OFFLOADED} gpus=1",
    f"deepspeed zero.stage=2 {OFFLOADED} gpus=1",
    f"deepspeed zero.stage=1 {OFFLOADED} gpus=1",
    "deepspeed zero.stage=1 gpus=1",
    "deepspeed zero.stage=2 gpus=1",
    "deepspeed zero.stage=3 gpus=1",
)
"""Layouts of one data-parallel rank under DeepSpeed."""
CASES: list[Case] = [
    (LLAMA_1B, 1, 1, "fsdp zero.stage=3"),
    (LLAMA_1B, 1, 2, "fsdp zero.stage=2"),
    (LLAMA_1B, 1, 2, "fsdp zero.stage=3 recompute=full"),
    (LLAMA_3B, 1, 1, "fsdp zero.stage=3"),
    (LLAMA_3B, 2, 2, "fsdp zero.stage=3 recompute=full"),
    (LLAMA_8B, 1, 1, "fsdp zero.stage=3 recompute=full"),
    (LLAMA_8B, 2, 1, "fsdp zero.stage=3"),
    (LLAMA_8B, 2, 2, "fsdp zero.stage=2 recompute=full"),
    (QWEN_8B, 1, 1, "fsdp zero.stage=3 recompute=full"),
    (MISTRAL, 1, 2, "fsdp zero.stage=3 recompute=full"),
    (LLAMA_70B, 8, 1, "fsdp zero.stage=3 recompute=full"),
    (PYTHIA, 1, 4, "fsdp zero.stage=3"),
    (LLAMA_1B, 1, 1, "ddp"),
    (LLAMA_1B, 1, 2, "ddp recompute=full"),
    (PYTHIA, 1, 2, "ddp"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=1"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=2"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=3"),
    (LLAMA_3B, 1, 1, "deepspeed zero.stage=3"),
    (LLAMA_3B, 1, 2, "deepspeed zero.stage=2 recompute=full"),
    (LLAMA_8B, 1, 1, "deepspeed zero.stage=2 recompute=full"),
    (LLAMA_8B, 1, 2, "deepspeed zero.stage=3 recompute=full"),
    (LLAMA_8B, 2, 1, "deepspeed zero.stage=1 recompute=full"),
    (QWEN_8B, 1, 1, "deepspeed zero.stage=3 recompute=full"),
    (PYTHIA, 1, 4, "deepspeed zero.stage=2"),
    (LLAMA_70B, 8, 1, "deepspeed zero.stage=3 recompute=full"),
    (LLAMA_8B, 1, 1, "deepspeed model=megatron tensor=2 zero.stage=2"),
    (LLAMA_8B, 1, 1, "deepspeed model=megatron tensor=4 zero.stage=3"),
    (LLAMA_8B, 1, 2, "deepspeed model=megatron tensor=2 zero.stage=1 recompute=full"),
    (PYTHIA, 1, 4, "deepspeed model=megatron tensor=2 zero.stage=1"),
    (LLAMA_1B, 1, 1, "megatron zero.stage=1"),
    (LLAMA_1B, 1, 4, "megatron tensor=2 zero.stage=1"),
    (LLAMA_1B, 1, 1, "megatron tensor=2 sequence=false zero.stage=0"),
    (LLAMA_3B, 1, 1, "megatron tensor=2 pipeline=2 zero.stage=1"),
    (LLAMA_3B, 1, 1, "megatron pipeline=4 zero.stage=1"),
    (LLAMA_8B, 1, 1, "megatron tensor=2 zero.stage=1"),
    (LLAMA_8B, 1, 2, "megatron tensor=4 zero.stage=1"),
    (LLAMA_8B, 1, 2, "megatron tensor=4 sequence=false zero.stage=1"),
    (LLAMA_8B, 1, 2, "megatron tensor=2 zero.stage=1 recompute=full"),
    (LLAMA_8B, 2, 1, "megatron tensor=2 pipeline=2 virtual_pipeline=4 zero.stage=1"),
    (LLAMA_8B, 2, 1, "megatron tensor=2 pipeline=4 zero.stage=1"),
    (LLAMA_8B, 2, 1, "megatron pipeline=4 virtual_pipeline=2 zero.stage=1 recompute=full"),
    (LLAMA_8B, 2, 1, "megatron tensor=4 pipeline=2 zero.stage=0 recompute=selective"),
    (QWEN_8B, 2, 1, "megatron tensor=2 pipeline=2 zero.stage=1"),
    (MISTRAL, 1, 1, "megatron tensor=2 pipeline=2 virtual_pipeline=2 zero.stage=1"),
    (OLMO, 2, 1, "megatron tensor=2 pipeline=2 zero.stage=1"),
    (PYTHIA, 1, 4, "megatron tensor=2 zero.stage=1"),
    (PYTHIA, 1, 4, "megatron pipeline=2 virtual_pipeline=2 zero.stage=1"),
    (GPT2, 1, 16, "megatron pipeline=2 zero.stage=1"),
    (QWEN_32B, 4, 1, "megatron tensor=8 pipeline=2 zero.stage=1"),
    (
        QWEN_32B,
        4,
        1,
        "megatron tensor=4 pipeline=4 virtual_pipeline=4 zero.stage=1 recompute=full",
    ),
    (LLAMA_70B, 8, 1, "megatron tensor=8 pipeline=4 zero.stage=1"),
    (LLAMA_70B, 8, 1, "megatron tensor=8 pipeline=2 virtual_pipeline=5 zero.stage=1"),
    (
        LLAMA_70B,
        8,
        1,
        "megatron tensor=4 pipeline=8 virtual_pipeline=2 zero.stage=1 recompute=full",
    ),
    (LLAMA_70B, 8, 1, "megatron tensor=8 pipeline=8 zero.stage=0"),
    (MIXTRAL, 4, 1, "megatron tensor=2 pipeline=2 expert=8 zero.stage=1"),
    (MIXTRAL, 4, 1, "megatron pipeline=4 expert=8 zero.stage=1 recompute=full"),
    (MIXTRAL, 4, 1, "fsdp zero.stage=3 recompute=full"),
    (QWEN_MOE, 2, 1, "megatron pipeline=2 expert=8 zero.stage=1"),
    (QWEN_MOE, 4, 1, "megatron tensor=2 expert=8 zero.stage=1 recompute=full"),
    (QWEN_MOE, 4, 1, "deepspeed zero.stage=3 recompute=full"),
    # Attention by plain products: soft-capped, with sinks.
    (GEMMA_2, 1, 1, "fsdp zero.stage=3"),
    (GEMMA_2, 1, 1, "deepspeed zero.stage=3 recompute=full"),
    (GEMMA_2, 1, 1, "megatron tensor=2 zero.stage=1"),
    (GEMMA_2, 1, 1, "megatron tensor=2 zero.stage=1 recompute=full"),
    (GPT_OSS, 2, 1, "fsdp zero.stage=3"),
    (GPT_OSS, 1, 1, "fsdp zero.stage=3 recompute=full"),
    (GPT_OSS, 2, 1, "deepspeed zero.stage=3 recompute=full"),
    (GPT_OSS, 2, 1, "megatron pipeline=2 expert=8 zero.stage=1"),
    (GPT_OSS, 1, 1, "megatron expert=8 zero.stage=1 recompute=full"),
    # One data-parallel rank.
    *((LLAMA_1B, 1, 1, words) for words in ALONE),
    (LLAMA_3B, 1, 1, "deepspeed model=megatron tensor=4 zero.stage=1 gpus=4"),
    (LLAMA_3B, 1, 1, "deepspeed model=megatron tensor=4 zero.stage=2 gpus=4"),
    (LLAMA_3B, 1, 1, "deepspeed model=megatron tensor=4 zero.stage=3 gpus=4"),
    (LLAMA_1B, 1, 1, f"fsdp zero.stage=3 {OFFLOADED} {ON_HOST} gpus=1"),
    (LLAMA_1B, 1, 1, "megatron zero.stage=1 gpus=1"),
    # There with so few tokens that the backward pass, not the loss, is the peak.
    *((LLAMA_1B, 1, 1, f"{words} length=256") for words in ALONE),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=3 {OFFLOADED} {ON_HOST} length=256"),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=2 {OFFLOADED} length=256"),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=1 {OFFLOADED} length=256"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=1 length=256"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=2 length=256"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=3 length=256"),
    # Offloaded on several.
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=1 {OFFLOADED}"),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=2 {OFFLOADED}"),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=3 {OFFLOADED}"),
    (LLAMA_8B, 1, 1, f"deepspeed zero.stage=3 {OFFLOADED} {ON_HOST} recompute=full"),
    (LLAMA_8B, 1, 1, f"deepspeed zero.stage=2 {OFFLOADED} recompute=full"),
    (LLAMA_8B, 1, 1, f"fsdp zero.stage=3 {OFFLOADED} {ON_HOST} recompute=full"),
    # Adapters.
    (LLAMA_1B, 1, 1, "ddp adapter=16"),
    (LLAMA_1B, 1, 1, "fsdp zero.stage=3 adapter=16"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=2 adapter=16"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=3 adapter=16 gpus=1"),
    (LLAMA_1B, 1, 1, f"deepspeed zero.stage=3 {OFFLOADED} {ON_HOST} adapter=16 gpus=1"),
    # Context.
    (LLAMA_1B, 1, 1, "fsdp zero.stage=3 context=2"),
    (LLAMA_1B, 1, 1, "deepspeed zero.stage=3 context=2"),
    (LLAMA_1B, 1, 1, "megatron context=2 zero.stage=1"),
]
_DEFAULTS = {
    "model": "hf",
    "tensor": "1",
    "pipeline": "1",
    "virtual_pipeline": "1",
    "expert": "1",
    "context": "1",
    "zero.stage": "0",
    "recompute": "none",
}


def settings(case: Case) -> list[str]:
    """The overrides of a case."""
    _, nodes, micro_batch, text = case
    engine, *words = text.split()
    stated = dict(word.split("=") for word in words)
    gpus, adapter = int(stated.pop("gpus", "8")), stated.pop("adapter", None)
    length = stated.pop("length", LENGTHS.get(case[0]))
    parallel = {**_DEFAULTS, **stated, "engine": engine}
    if engine == "megatron":
        parallel["model"] = "megatron"
    degree = int(parallel["tensor"]) * int(parallel["pipeline"]) * int(parallel["context"])
    batch = micro_batch * nodes * gpus // degree * 2 * int(parallel["pipeline"])
    model = SHAPES.get(case[0])
    return [
        *(() if model is None else ("model.hub=null", f"model.config={model[1]}")),
        *(f"parallel.{key}={value}" for key, value in parallel.items()),
        f"cluster.nodes={nodes}",
        f"cluster.gpus_per_node={gpus}",
        f"training.global_batch_size={batch}",
        f"training.micro_batch_size={micro_batch}",
        *([] if adapter is None else [f"adapter={{rank: {adapter}, alpha: 32}}"]),
        *([] if length is None else [f"training.sequence_length={length}"]),
    ]


def name(case: Case) -> str:
    """What a case is called in FILE."""
    return " ".join(map(str, case))


def rehearse(case: Case, mode: Any) -> dict[str, Any]:
    """Peak bytes of the ranks of the first and the last stage, by rank."""
    from toolkit.rehearse.gpu.dress import DressRehearsal
    from toolkit.rehearse.gpu.rank import rehearse as rehearse_rank

    rehearsal = DressRehearsal.of(assignment(case))
    layout = {k: v for k, v in asdict(rehearsal.layout).items() if v != ()}
    found: dict[str, Any] = {"layout": layout, "ranks": {}}
    for rank in dict.fromkeys((rehearsal.ranks[0], rehearsal.ranks[-1])):
        with tempfile.NamedTemporaryFile("r") as file:
            if os.fork() == 0:
                try:
                    result = asdict(rehearse_rank(rehearsal.assignment, rank, mode))
                except BaseException:  # noqa: BLE001 - the parent tells it
                    result = {"error": traceback.format_exc()}
                Path(file.name).write_text(json.dumps(result))
                os._exit(0)
            os.wait()
            found["ranks"][rank] = json.loads(Path(file.name).read_text() or "{}")
    return found


def assignment(case: Case) -> Any:
    """The case, planned."""
    from toolkit.intake.load import load_recipe
    from toolkit.run.assignment import decide

    base, _ = SHAPES.get(case[0], (case[0], ""))
    recipe = load_recipe(RECIPES / f"{base}.yaml", settings(case))
    return decide(recipe, None)


def compare(case: Case, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Planner and rehearsal, rank by rank."""
    from dataclasses import replace

    from toolkit.layout import Layout
    from toolkit.rehearse.gpu.dress import DressRehearsal, RehearsedRank
    from toolkit.rehearse.gpu.peak import Peak

    layout, planned = Layout(**found["layout"]), assignment(case)
    plan = replace(planned.plan, layout=layout)
    rehearsal = DressRehearsal.of(replace(planned, plan=plan))
    rows = []
    for rank, peak in found["ranks"].items():
        if "nbytes" not in peak:
            print(name(case), rank, peak.get("error", "killed"), file=sys.stderr)
            continue
        held = Peak(peak["nbytes"], peak["holders"])
        one = RehearsedRank(rehearsal, int(rank), held)
        capacity = rehearsal.estimate.setup.cluster.gpu.memory_gib
        rows.append(
            {
                "case": name(case),
                "rank": int(rank),
                "rehearsed_gib": one.peak.nbytes / 2**30,
                "planned_gib": one.planned.allocated / 2**30,
                "error": one.planned.allocated / one.peak.nbytes - 1,
                "called_fitting": one.planned.total / 2**30 <= capacity,
                "fits": one.fits,
            }
        )
    return rows


def main() -> None:
    """Rehearse what is missing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--compare", action="store_true", help="rehearse nothing")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = [case for case in CASES if re.search(options.only, name(case))]
    missing = [case for case in cases if options.again or name(case) not in known]
    if missing and not options.compare:
        guard.load()
        mode = import_module("toolkit.rehearse.gpu.device").pretend()
        backends = import_module("toolkit.backend").BACKENDS
        for one in backends.names:
            import_module(backends[one].engine.partition(":")[0])
        for case in missing:
            known[name(case)] = rehearse(case, mode)
            options.out.write_text(json.dumps(known, indent=1))
            show(compare(case, known[name(case)]))
    rows = [
        row for case in cases if name(case) in known for row in compare(case, known[name(case)])
    ]
    if not missing or options.compare:
        show(rows)
    errors = [abs(row["error"]) for row in rows]
    wrong = [row["case"] for row in rows if row["called_fitting"] and not row["fits"]]
    print(
        f"{len(rows)} ranks of {len({row['case'] for row in rows})} layouts: planner's memory "
        "off by "
        f"{sum(errors) / len(errors):.1%} on average, {max(errors):.1%} at most; "
        f"too large but called fitting: {wrong or 'none'}"
    )


def show(rows: list[dict[str, Any]]) -> None:
    """One line per rank."""
    for row in rows:
        print(
            f"{row['error']:+7.1%}  {row['planned_gib']:7.2f} of {row['rehearsed_gib']:7.2f}"
            f"  {row['case']}, rank {row['rank']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
