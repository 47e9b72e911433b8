"""Backend of engine `megatron`: everything except training."""

from collections.abc import Iterator
from typing import Any

from toolkit.backend import ANY, Backend, Rehearsed, Support
from toolkit.engines.megatron import config
from toolkit.errors import Problem
from toolkit.layout import Layout, ModelName
from toolkit.plan.cost.engine import EngineCost, in_place_logit_bytes
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import degree
from toolkit.recipe.schema import Recipe


class MegatronCost(EngineCost):
    """megatron-core's gradient buffers, distributed optimizer and schedules."""

    fp32_states = False
    sums_whole_gradients = True
    megatron_kernels = True
    overlap = "overlap.megatron"

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
        )
    }
    packages = ("megatron-core",)
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

    def rules(self, job: PlanRequest, model: ModelName) -> Iterator[Problem]:
        """optimizer/__init__.py gives expert-parallel experts a separate optimizer, and each
        optimizer a dynamic loss scale: all skip a step that overflows, but only the one that
        overflowed lowers its scale."""
        if job.training.precision == "fp16" and degree(job.parallel.expert) > 1:
            yield Problem(
                "training.precision",
                f"fp16 with parallel.expert: {job.parallel.expert}",
                "bf16 or fp32: in fp16, megatron-core scales the losses of experts and of the "
                "rest apart, and they drift after an overflow",
                "set training.precision to bf16, or parallel.expert to 1",
            )
        if job.training.precision == "fp16" and job.optimizer.kind.whole is not None:
            yield Problem(
                "training.precision",
                f"fp16 with optimizer.name: {job.optimizer.name} on engine megatron",
                "bf16 or fp32: in fp16, each of megatron-core's optimizers decides for itself "
                "whether it steps, and owners of whole tensors need the gradients of all ranks",
                "set training.precision to bf16",
            )


BACKEND = MegatronBackend()
