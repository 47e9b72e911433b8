"""The planner's memory beside the dress rehearsal's, over many layouts.

    python benchmarks/gpu_memory.py --out FILE [--only PATTERN] [--again] [--add CASE]

FILE keeps what was rehearsed, so that the planner can be compared with it again in seconds;
only what is missing in it is rehearsed (`--again`: everything). The cases are those of the
figures stored in results/, and CASE: RECIPE NODES MICRO_BATCH ENGINE [KEY=VALUE …]. Ranks of
the first and the last pipeline stage run one after the other, forked from one process that has
imported all.
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
STORED = Path(__file__).parent / "results" / "gpu-memory-fake-2026-11-28.json"
LLAMA_1B, GEMMA_2 = "llama/llama-3.2-1b-pretrain", "gemma-2-2b"
SHAPES: dict[str, tuple[str, str]] = {
    # google/gemma-2-2b's config.json; what it leaves out is the family's default.
    GEMMA_2: (
        LLAMA_1B,
        "{model_type: gemma2, vocab_size: 256000, hidden_size: 2304, intermediate_size: 9216, "
        "num_hidden_layers: 26, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 256}",
    ),
}
"""Models without a recipe: another model's recipe, and their config."""
LENGTHS = {
    "mistral/mixtral-8x7b-pretrain": 8192,
    "gpt-oss/gpt-oss-20b-pretrain": 4096,
    GEMMA_2: 4096,
}
"""Tokens of a sequence where it is not the recipe's."""

Case = tuple[str, int, int, str]
"""Recipe, nodes of eight H100 (or `gpus`), size of a micro batch, settings of `parallel`, and
the rank of an `adapter` and tokens of a sequence (`length`)."""
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


def case_of(text: str) -> Case:
    """The case of a name."""
    recipe, nodes, micro_batch, words = text.split(" ", 3)
    return recipe, int(nodes), int(micro_batch), words


CASES = [case_of(text) for text in json.loads(STORED.read_text(encoding="utf-8"))]
"""Those of the stored figures."""


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
    from toolkit.rehearse.gpu import Peak
    from toolkit.rehearse.gpu.dress import DressRehearsal

    layout, planned = Layout(**found["layout"]), assignment(case)
    plan = replace(planned.plan, layout=layout)
    rehearsal = DressRehearsal.of(replace(planned, plan=plan))
    rows = []
    for rank, peak in found["ranks"].items():
        if "nbytes" not in peak:
            print(name(case), rank, peak.get("error", "killed"), file=sys.stderr)
            continue
        held = Peak(peak["nbytes"], peak["holders"])
        one = rehearsal.compared(int(rank), held)
        rows.append(
            {
                "case": name(case),
                "rank": int(rank),
                "rehearsed_gib": one.peak.nbytes / 2**30,
                "planned_gib": one.planned.allocated / 2**30,
                "error": one.planned.allocated / one.peak.nbytes - 1,
                "called_fitting": one.planned.total / 2**30 <= one.capacity_gib,
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
    parser.add_argument("--add", type=case_of, action="append", default=[])
    parser.add_argument("--compare", action="store_true", help="rehearse nothing")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = [case for case in [*CASES, *options.add] if re.search(options.only, name(case))]
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
