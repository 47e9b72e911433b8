"""The planner's own studies: published layouts next to its choices, and how 70B scales.

    python benchmarks/scaling.py [--write docs/planner.md]

Prints two Markdown tables, or writes them between their markers in a document. Everything is
predicted; nothing is run. Takes a few seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import document  # next to this script

from toolkit.hardware.cluster import Cluster, parse_cluster
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout, Pair
from toolkit.plan.dimensions import recompute_text
from toolkit.plan.planner import explore
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import kernels
from toolkit.plan.search import Candidate, Search, evaluate, search, shortage
from toolkit.plan.workloads import workload_of
from toolkit.recipe.schema import ClusterSection, ParallelSection, TrainingSection

RECIPES = Path(__file__).parents[1] / "recipes"
MEGATRON = Pair("megatron", "megatron")
PAYS = 0.05
"""A strategy pays as long as it is at most this much slower than the best one."""
SIZES = [8 * 2**power for power in range(12)]
"""GPUs of the scaling study: 8 to 16,384."""
GPT3_175B: dict[str, object] = {
    "model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048,
    "vocab_size": 51200,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """What others chose for a model on a cluster."""

    name: str
    cluster: str
    recipe: str
    """Of the model, or `175B`."""
    batch: int
    layout: Layout
    """Without accumulation; more data parallel where the source had fewer GPUs."""
    source: str


PUBLISHED = (
    Published(
        "8B on 8 H100", "8xh100-80gb", "llama/llama-3.1-8b-pretrain", 128,
        Layout(dp=4, cp=2, zero_stage=1),
        "NVIDIA dgxc-benchmarking, llama3.1/README_8b.md",
    ),
    Published(
        "70B on 64 H100", "8x8xh100-80gb", "llama/llama-3.1-70b-pretrain", 128,
        Layout(dp=2, tp=4, pp=4, vpp=5, cp=2, sequence_parallel=True, zero_stage=1),
        "NVIDIA NeMo 24.12, performance summary (in FP8)",
    ),
    Published(
        "405B on 1,024 H100", "128x8xh100-80gb", "llama/llama-3.1-405b-pretrain", 2048,
        Layout(dp=8, tp=8, pp=16, sequence_parallel=True, zero_stage=1),
        "Llama 3, arXiv:2407.21783, table 4 (with 64 and 128 data-parallel ranks)",
    ),
    Published(
        "175B on 1,024 A100", "128x8xa100-80gb", "175B", 1536,
        Layout(
            dp=16, tp=8, pp=8, vpp=3, sequence_parallel=True, zero_stage=0,
            recompute="selective",
        ),
        "Korthikanti et al., arXiv:2205.05198, table 3 (with 1 data-parallel rank)",
    ),
)  # fmt: skip


def job_of(recipe: str, cluster: Cluster, batch: int | None = None) -> PlanRequest:
    """A model on a cluster, with everything else left to the search."""
    where = ClusterSection(
        nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu.name
    )
    if recipe == "175B":
        training = TrainingSection(
            steps=1, sequence_length=2048, global_batch_size=batch or 1536
        )
        return PlanRequest(ParallelSection(), where, training, GPT3_175B)
    loaded = load_recipe(RECIPES / f"{recipe}.yaml")
    assert loaded.model.config is not None, "stated in every shipped recipe"
    update = {} if batch is None else {"global_batch_size": batch}
    training = loaded.training.model_copy(update=update)
    return PlanRequest(ParallelSection(), where, training, loaded.model.config)


# Published choices


def published_table() -> Iterator[str]:
    """One line per published layout and one for the planner's choice below it."""
    yield "| | layout | predicted GiB per GPU | predicted step | source |"
    yield "|---|---|---|---|---|"
    for one in PUBLISHED:
        cluster = parse_cluster(one.cluster)
        job = job_of(one.recipe, cluster, one.batch)
        layout = replace(
            one.layout,
            gradient_accumulation=one.batch // one.layout.dp,
            fused=kernels.fused(job, MEGATRON),
        )
        theirs = evaluate(workload_of(job, MEGATRON), layout, cluster)
        ours = search(job, cluster).best
        yield _line(f"{one.name}, published", theirs, cluster, one.source)
        yield _line("chosen", ours, cluster, "this planner")


def _line(name: str, one: Candidate, cluster: Cluster, source: str) -> str:
    need = f"{one.memory_gib:.0f}"
    if shortage(one, cluster):
        need += f" of {cluster.gpu.memory_gib:g}: does not fit with this toolkit's engines"
    return f"| {name} | {short(one)} | {need} | {one.step_s:.1f} s | {source} |"


def short(one: Candidate) -> str:
    """`megatron dp4 tp8 pp2 zero1, micro batch 1`."""
    layout = one.layout
    words = [one.pair.engine, f"dp{layout.dp}"]
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if (degree := getattr(layout, name)) > 1:
            words.append(f"{name}{degree}")
    words.append(f"zero{layout.zero_stage}")
    text = f"{' '.join(words)}, micro batch {layout.micro_batch}"
    if layout.cp > 1:
        text += f", {layout.exchange}"
    return text if layout.recompute == "none" else f"{text}, recompute {recompute_text(layout)}"


# Scaling

STRATEGIES: dict[str, Callable[[Candidate], bool]] = {
    "data parallel (ZeRO)": lambda one: one.layout.tp * one.layout.pp == 1,
    "tensor": lambda one: one.layout.tp > 1 and one.layout.pp == 1,
    "pipeline": lambda one: one.layout.tp == 1 and one.layout.pp > 1,
    "tensor and pipeline": lambda one: one.layout.tp > 1 and one.layout.pp > 1,
}
"""How the model itself is split."""


def scaling_table() -> Iterator[str]:
    """Tokens per second and GPU of the best layout of each strategy, by number of GPUs."""
    yield f"| GPUs | {' | '.join(STRATEGIES)} | best layout |"
    yield f"|{'---|' * (len(STRATEGIES) + 2)}"
    paying: dict[str, list[int]] = {name: [] for name in STRATEGIES}
    for gpus in SIZES:
        found = studied(gpus)
        tokens = found.job.training.global_batch_size * found.job.training.sequence_length
        fastest = min((one.step_s or 0.0 for one in found.fitting), default=0.0)
        cells = []
        for name, belongs in STRATEGIES.items():
            best = _fastest(found, belongs)
            if best is None or best.step_s is None:
                cells.append("–")
                continue
            speed = f"{tokens / best.step_s / gpus:,.0f}"
            pays = best.step_s <= (1 + PAYS) * fastest
            if pays:
                paying[name].append(gpus)
            cells.append(f"**{speed}**" if pays else speed)
        yield f"| {gpus:,} | {' | '.join(cells)} | {_offload(found)}{short(found.best)} |"
    yield ""
    for name, sizes in paying.items():
        where = "pays nowhere here"
        if sizes:
            where = f"pays from {sizes[0]:,} to {sizes[-1]:,} GPUs"
        yield f"- {name}: {where}."


def studied(gpus: int) -> Search:
    """Llama 3.1 70B with its recipe's batch of 2,048 sequences on H100."""
    cluster = parse_cluster(f"{gpus // 8}x8xh100-80gb")
    return search(job_of("llama/llama-3.1-70b-pretrain", cluster), cluster)


def _fastest(found: Search, belongs: Callable[[Candidate], bool]) -> Candidate | None:
    able = (one for one in found.fitting if belongs(one))
    return min(able, key=lambda one: one.step_s or 0, default=None)


def _offload(found: Search) -> str:
    away = found.best.layout.offload_optimizer
    return "" if away == "none" else f"optimizer on the {away}: "


# Long rows

LENGTHS = (32_768, 131_072)
"""Tokens of a row in the study of context parallel."""


def context_table() -> Iterator[str]:
    """The best layout without and with context parallel, of an 8B model on 64 H100."""
    yield "| tokens per row | context 1 | step | context auto | step |"
    yield "|---|---|---|---|---|"
    cluster = parse_cluster("8x8xh100-80gb")
    loaded = load_recipe(RECIPES / "llama/llama-3.1-8b-pretrain-128k.yaml")
    tokens = loaded.training.global_batch_size * loaded.training.sequence_length
    for length in LENGTHS:
        batch = {"sequence_length": length, "global_batch_size": tokens // length}
        cells = []
        for degree in (1, "auto"):
            asked = loaded.with_values(
                {f"training.{key}": value for key, value in batch.items()}
                | {"parallel.context": degree, "parallel.engine": MEGATRON.engine}
            )
            best = explore(asked, cluster).best
            cells += [short(best), f"{best.step_s:.1f} s"]
        yield f"| {length:,} | {' | '.join(cells)} |"


# Output

TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "published": published_table,
    "scaling": scaling_table,
    "context": context_table,
}


updated = partial(document.updated, tables=TABLES)

if __name__ == "__main__":
    document.main(__doc__.splitlines()[0] if __doc__ else "", TABLES)
