"""Backend of engine `deepspeed`: everything except training."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from toolkit.backend import ANY, Backend, Rehearsed, Support
from toolkit.engines.deepspeed import ops
from toolkit.engines.deepspeed.accelerate import DeepSpeedInAccelerate
from toolkit.engines.deepspeed.config import adopted, render
from toolkit.engines.deepspeed.keys import HPZ, LESS_EXACT
from toolkit.errors import Problem
from toolkit.layout import Layout, ModelName, Placement, Stage
from toolkit.plan.cost.engine import FP32_BYTES, EngineCost
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.recipe.schema import Recipe
from toolkit.text.dotted import get

BUCKET = 1e8
"""Elements of the reduce and all-gather buckets of `ds_configs`."""
LIVE_PARAMETERS = 1e9
"""Gathered elements that ZeRO-3 keeps at once (stage3_max_live_parameters)."""
SUB_GROUP = 1e9
"""Elements that ZeRO-3 updates at once (sub_group_size)."""
FP64_BYTES = 8
NORM_ELEMENTS = 2.5e8
"""Elements whose norm stage 3 takes in fp64 at once (`_constant_buffered_norm2`)."""
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_OFFLOADED = Layout(dp=2, zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
_CPU: frozenset[Placement] = frozenset(("none", "cpu"))
_CPU_OR_NVME: frozenset[Placement] = frozenset(("none", "cpu", "nvme"))


class DeepSpeedCost(EngineCost):
    """ZeRO with the buckets of `ds_configs`."""

    fp32_states = False
    sums_whole_gradients = True
    gathers_beside_forward = False
    overlap = "overlap.deepspeed"

    def builds_whole(self, model: ModelName, layout: Layout) -> bool:
        """megatron-core builds a tensor-parallel rank's whole model before DeepSpeed shards or
        offloads it. transformers' is sharded while it is built."""
        return model == "megatron"

    def communicators(self, layout: Layout) -> int:
        """Without groups that it is given, DeepSpeed copies the one of all ranks."""
        return super().communicators(layout) + (layout.world > 1 and layout.tp == 1)

    def gradient_copies(self, layout: Layout, width: int) -> tuple[int, int]:
        """Stage 3 keeps its sums on the host, writes and reads them in every micro batch, and
        then copies them for the optimizer. Stages 1 and 2 do so with fp32 gradients only. fp32
        sums of 16-bit ones stay on the device."""
        if layout.zero_stage == 3:
            return 2, 1
        return (0, 1) if width < FP32_BYTES or layout.gradient_accumulation == 1 else (2, 0)

    def keeps_gradients(self, width: int) -> bool:
        """The fp32 sums of 16-bit gradients."""
        return width < FP32_BYTES

    def buffers(self, layout: Layout, width: int, share: StageShare) -> float:
        """Reduce buckets (two if communication overlaps), the fp32 copy of one, gathered
        weights. One data-parallel rank gathers those that are offloaded.
        Stage 1 keeps a micro batch's gradients until the next one's. If the optimizer is
        offloaded, it has an fp32 bucket, and stages 1 and 2 room for the largest gradient."""
        stage, trained, ranks = layout.zero_stage, share.trained, layout.dp * layout.cp
        elements = min(BUCKET, trained.parameters)
        bucket, cast = width * elements, FP32_BYTES * elements if width < FP32_BYTES else 0
        if stage == 0:
            return 0.0
        if stage == 3:
            loaded = width * min(LIVE_PARAMETERS, share.parameters)
            if ranks == 1:
                return FP32_BYTES * BUCKET + loaded * (layout.offload_parameters != "none")
            return FP32_BYTES * BUCKET + cast + loaded
        if layout.offload_optimizer != "none":
            room = width * trained.output
            if stage == 1:
                return room + FP32_BYTES * trained.parameters / ranks + cast
            return room + 3 * bucket + cast
        if stage == 1 and layout.gradient_accumulation > 1:
            return width * trained.parameters + cast
        return (2 if stage == 1 else 3) * bucket + cast

    def buffers_at_loss(self, layout: Layout, width: int, share: StageShare) -> float:
        """Stages 1 and 2 have their buckets in the backward pass only, but that of stage 1 with
        an offloaded optimizer, and the room for the largest gradient."""
        stage, trained = layout.zero_stage, share.trained
        if stage not in (1, 2):
            return self.buffers(layout, width, share)
        if layout.offload_optimizer != "none":
            sums = FP32_BYTES * min(BUCKET, trained.parameters)
            return width * trained.output + sums * (stage == 1)
        keeps = stage == 1 and layout.gradient_accumulation > 1
        return width * trained.parameters * keeps

    def buffers_at_end(self, layout: Layout, width: int, share: StageShare) -> float:
        """The embedding's gradient and its fp32 copy, buckets, the part whose norm is taken in
        fp64, and what stage 1 keeps. In stage 3, fp32 gradients of a group of parameters."""
        stage, trained, ranks = layout.zero_stage, share.trained, layout.dp * layout.cp
        away = layout.offload_optimizer
        if stage == 0:
            return 0.0
        largest, shard = trained.output, trained.parameters / ranks
        own = width * largest
        if stage == 3:
            if away == "none":
                return FP32_BYTES * (BUCKET + min(SUB_GROUP, shard))
            own *= 1 + (ranks > 1 or layout.offload_parameters != "none")
            part = largest / ranks
            norm = FP64_BYTES * min(NORM_ELEMENTS, part)
            return FP32_BYTES * BUCKET + own + FP64_BYTES * part + norm
        elements = min(BUCKET, trained.parameters)
        norm, buckets = FP64_BYTES * min(largest, shard), 2 * width * elements
        if away != "none":
            held = own + buckets if stage == 2 else FP32_BYTES * (shard + elements)
            return own + held + norm
        if stage == 2:
            return max(own + FP32_BYTES * largest + buckets, norm)
        keeps = width * trained.parameters * (layout.gradient_accumulation > 1)
        return max(own + FP32_BYTES * largest + keeps, norm)


class DeepSpeedBackend(Backend):
    """ZeRO and offload, for a model of either implementation."""

    name = "deepspeed"
    engine = "toolkit.engines.deepspeed.engine:DeepSpeedEngine"
    supports = {
        "hf": Support(
            auto=True,
            degrees={"context": ANY},
            zero_stages=_STAGES,
            kernel_stages=_STAGES[:3],
            zero_config=True,
            offload_optimizer=_CPU_OR_NVME,
            offload_parameters=_CPU_OR_NVME,
        ),
        "megatron": Support(
            degrees={"tensor": ANY, "context": ANY},
            sequence=True,
            zero_stages=_STAGES,
            zero_config=True,
            offload_optimizer=_CPU,
            offload_parameters=_CPU,
            recompute=("none", "selective", "full"),
        ),
    }
    packages = ("deepspeed",)
    device_variable = "DS_ACCELERATOR"
    configured = True
    distributed_types = ("DEEPSPEED",)
    accelerate = DeepSpeedInAccelerate()
    rehearsals = (
        *(Rehearsed(f"zero{stage}", "hf", Layout(dp=2, zero_stage=stage)) for stage in _STAGES),
        *(
            Rehearsed(f"zero{stage}-cp2", "hf", Layout(cp=2, zero_stage=stage))
            for stage in _STAGES[2:]
        ),
        Rehearsed("zero3-offload", "hf", _OFFLOADED),
        *(
            Rehearsed(
                f"megatron-tp2-zero{stage}", "megatron", Layout(dp=2, tp=2, zero_stage=stage)
            )
            for stage in _STAGES[1:]
        ),
    )
    cost = DeepSpeedCost()

    def adopt(self, recipe: Recipe) -> Recipe:
        """Take stage and offload from `parallel.zero.config` if the recipe does not set them.

        Values that the recipe states stay, and must agree with the file (`render` checks that).
        """
        config = recipe.parallel.zero.config
        found = {} if config is None else adopted(config)
        open_keys = (key for key in found if attrgetter(key)(recipe) == "auto")
        return recipe.with_values({key: found[key] for key in open_keys})

    def render(self, recipe: Recipe, layout: Layout) -> dict[str, Any]:
        """`deepspeed.json`."""
        return render(recipe, layout)

    def prepare(self, config: Mapping[str, Any], report: Callable[[str], None]) -> None:
        """Build its operators, which DeepSpeed would compile one rank at a time."""
        ops.put_ninja_on_path()
        needed = self.operators(config)
        ops.preflight(needed)
        ops.build(needed, report)

    def operators(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """See `ops.required_ops`."""
        return ops.required_ops(config)

    def refusal(self, job: PlanRequest, model: ModelName) -> Problem | None:
        """DeepSpeed averages every gradient over all ranks. megatron-core's experts need groups
        of their own."""
        if model == "hf" or not job.spec.moe_layers:
            return None
        stated = job.parallel.engine != "auto"
        found = self.name if stated else "what only DeepSpeed has"
        return Problem(
            "parallel.engine" if stated else "parallel.zero",
            f"{found} with model {model} and experts",
            f"a model without experts for engine {self.name} with model {model}",
            "set parallel.engine to megatron and leave parallel.zero out, or parallel.model to "
            "hf and parallel.tensor to 1",
        )

    def rules(self, job: PlanRequest, model: ModelName) -> Iterator[Problem]:
        """In 16 bits, stage 0 sums the gradients of micro batches in 16 bits."""
        precision = job.training.precision
        if job.parallel.zero.stage == 0 and precision != "fp32":
            yield Problem(
                "parallel.zero.stage",
                f"0 with precision: {precision} on engine {self.name}",
                "1, 2 or 3: DeepSpeed's stage 0 sums the gradients of micro batches in 16 bits",
                "set parallel.zero.stage to 1 (or auto), or parallel.engine to ddp",
            )

    def approximations(
        self, plan: Plan, precision: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """AdamW on the CPU, what the file rounds, and rounding for communication.

        `data_types.grad_accum_dtype` only applies to each rank's own sum.
        """
        yield from (LESS_EXACT[key] for key in LESS_EXACT if get(config, key))
        if (get(config, HPZ) or 1) > 1:
            yield (
                "planned memory",
                f"without the second copy of the weights that {HPZ} keeps",
            )
        if plan.layout.offload_optimizer != "none":
            yield (
                "offloaded AdamW",
                "DeepSpeed's own on the CPU, which rounds in another order",
            )
        ranks = plan.layout.dp * plan.layout.cp
        if ranks == 1:
            return
        # engine.py, `communication_data_type`: by default the training precision.
        sent_in = config.get("communication_data_type") or precision
        if sent_in != "fp32":
            yield (
                "gradient reduction",
                f"gradients are summed over {ranks:,} data-parallel ranks in {sent_in}",
            )


BACKEND = DeepSpeedBackend()
