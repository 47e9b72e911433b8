"""Backend of engine `megatron`: everything except training."""

from typing import Any

from toolkit.backend import ANY, Backend, Rehearsed, Support
from toolkit.engines.megatron import config
from toolkit.layout import Layout
from toolkit.plan.cost.engine import EngineCost, in_place_logit_bytes
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe


class MegatronCost(EngineCost):
    """megatron-core's gradient buffers, distributed optimizer and schedules."""

    fp32_states = False
    sums_whole_gradients = True
    megatron_kernels = True
    overlap = "overlap.megatron"
    overlaps_on_cpus = False

    def logit_bytes(self, width: int, tp: int) -> int:
        """See `in_place_logit_bytes`."""
        return in_place_logit_bytes(width)

    def communicators(self, layout: Layout) -> int:
        """Every kind of group has a communicator, also if it has all ranks: those that share an
        optimizer, data, tensor, pipeline with tied embeddings, context, experts and theirs."""
        data = layout.dp * layout.cp > 1
        model = (layout.tp > 1) + 2 * (layout.pp > 1) + (layout.cp > 1) + 2 * (layout.ep > 1)
        return 2 * (layout.world > 1) + data + model


class MegatronBackend(Backend):
    """megatron-core's DDP, distributed optimizer and pipeline schedules."""

    name = "megatron"
    engine = "toolkit.engines.megatron.engine:MegatronEngine"
    supports = {
        "megatron": Support(
            auto=True,
            degrees=dict.fromkeys(
                ("tensor", "pipeline", "virtual_pipeline", "context", "expert"), ANY
            ),
            sequence=True,
            zero_stages=(0, 1),
            recompute=("none", "selective", "full"),
            precisions=frozenset(("fp32", "bf16")),
        )
    }
    packages = {"megatron-core": "megatron.core"}
    configured = True
    distributed_types = ("MEGATRON_LM",)
    cost = MegatronCost()
    rehearsals = (
        Rehearsed("megatron-tp2", "megatron", Layout(tp=2)),
        Rehearsed("megatron-tp2-sp", "megatron", Layout(tp=2, sequence_parallel=True)),
        Rehearsed("megatron-pp2", "megatron", Layout(pp=2)),
        Rehearsed("megatron-pp2-vpp2", "megatron", Layout(pp=2, vpp=2)),
        Rehearsed("megatron-dp2-distopt", "megatron", Layout(dp=2, zero_stage=1)),
        Rehearsed("megatron-cp2", "megatron", Layout(cp=2)),
        Rehearsed("megatron-ep2", "megatron", Layout(dp=2, ep=2)),
        Rehearsed(
            "megatron-tp2-pp2-sp", "megatron", Layout(tp=2, pp=2, sequence_parallel=True)
        ),
        Rehearsed(
            "megatron-tp2-cp2-sp", "megatron", Layout(tp=2, cp=2, sequence_parallel=True)
        ),
    )

    def render(self, recipe: Recipe, layout: Layout) -> dict[str, Any]:
        """`megatron.json`."""
        return config.render(recipe, layout)

    def shown(self, recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
        """`megatron.json`, or only its model sections if another engine trains megatron-core's
        model."""
        if plan.model not in self.supports:
            return None
        found = self.render(recipe, plan.layout)
        if plan.engine != self.name:
            found = {section: found[section] for section in ("transformer", "gpt")}
        return found


BACKEND = MegatronBackend()
