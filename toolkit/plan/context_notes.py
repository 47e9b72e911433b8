"""Why context parallel, and why this exchange: what a plan says next to these decisions."""

from toolkit.plan.cost.exchange import ContextSplit, context_split
from toolkit.plan.cost.workload import Workload
from toolkit.plan.rules.models import pair_problems
from toolkit.plan.search import Search
from toolkit.plan.workloads import workload_of


def _split(found: Search) -> ContextSplit:
    """Of a layer's attention."""
    layout, workload = found.best.layout, workload_of(found.job, found.best.pair)
    own = layout.micro_batch * workload.sample_tokens / layout.cp
    return context_split(workload, layout.exchange, layout.tp, layout.cp, own)


def exchanged(found: Search) -> str:
    """What a rank receives in a layer, next to what it would if its context group were tensor
    ranks, too: an all-gather and a reduce-scatter of activations around attention, and around
    the MLP (Korthikanti et al., arXiv:2205.05198, section 4.2.2)."""
    layout, split = found.best.layout, _split(found)
    workload = workload_of(found.job, found.best.pair)
    row = 4 * layout.micro_batch * workload.sample_tokens * found.job.spec.hidden
    ranks = layout.tp * layout.cp
    mine = split.received + row / layout.cp * (layout.tp - 1) / layout.tp
    theirs = row * (ranks - 1) / ranks
    return (
        f"; a rank receives {_mib(mine, workload)} per layer and pass, with tensor {ranks} "
        f"instead {_mib(theirs, workload)}"
    )


def refused(found: Search) -> str:
    """What excludes every degree above 1; empty if nothing does."""
    job = found.job.stating({"parallel.context": 2})
    for problem in pair_problems(job, found.best.pair):
        if "context" in f"{problem.key} {problem.found}":
            return f"; 2 or more excluded by {problem.key} {problem.found}"
    return ""


def kept(found: Search) -> str:
    """What an exchange keeps, and whether attention hides it."""
    split, workload = _split(found), workload_of(found.job, found.best.pair)
    text = f"; {_mib(2 * split.attended_key, workload)} of keys and values per layer and rank"
    if split.rings > 1:
        text += f", which {split.rings} ranks pass on while they attend"
    if split.heads > 1:
        text += f"; {split.heads} ranks split the heads"
    return text


def _mib(elements: float, workload: Workload) -> str:
    return f"{workload.width * elements / 2**20:,.0f} MiB"
