"""Published measurements as workloads, layouts and clusters.

A case states a model, its hardware, layout and batch (docs: `dmt estimate --cases`). Fields
that a source did not state get one default per engine, listed below; reported results are never
read.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from toolkit.errors import PlanError
from toolkit.extras.published.formulas import EstimatorQuery
from toolkit.hardware.catalogue import GPUS
from toolkit.hardware.cluster import default_cluster, link, usual_gpus_per_node
from toolkit.layout import CostPrecision, Layout, Placement, Recompute
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.workload import TensorOverlap, Workload
from toolkit.plan.estimate import Setup
from toolkit.text.units import GIB

LAYERS_PER_CHUNK = 2
"""Layers of a pipeline chunk if a source does not state the interleaving."""
FAMILY = re.compile(r"gb\d{3}|b\d{3}|h\d{3}|a\d{3}|v\d{3}|mi\d{3}x", re.IGNORECASE)
MEMORY = re.compile(r"(\d+)\s*gb", re.IGNORECASE)
NETWORK = re.compile(r"inter-node (\d+) gb/s per (\d+)-gpu node")
BITS_PER_BYTE = 8
_WIRE_BYTES = {"PURE": 2, "DEFAULT": 4}
"""Composer's mixed precision modes: what gradients are reduced in."""


class Case:
    """A published case, with words for what its fields mean."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: the case as its file has it; what it reports is left behind here."""
        self._model: Mapping[str, Any] = fields["model"]
        self._layout: Mapping[str, Any] = fields["layout"]
        self._batch: Mapping[str, Any] = fields.get("batch") or {}
        self._hardware: Mapping[str, Any] = fields["hardware"]
        self._precision = str(fields.get("precision") or "bf16").lower()
        self._attention = fields.get("attention_kernel")
        self._notes = str(fields.get("notes") or "").lower()

    @property
    def has_shape(self) -> bool:
        """Whether the model's shape is stated, not only its number of parameters."""
        keys = ("layers", "hidden", "heads", "vocab", "seq")
        return all(self._model.get(key) is not None for key in keys)

    @property
    def parameters(self) -> float | None:
        """The stated number of parameters."""
        return self._model.get("params")

    @property
    def ranks(self) -> int:
        """Accelerators of the run."""
        return int(self._hardware["n_gpus"])

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 where none is stated."""
        return int(self._layout.get("zero_stage") or 0)

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: stated, or all that the other degrees leave."""
        others = self._degree("tp") * self._degree("pp") * self._degree("cp")
        return int(self._layout.get("dp") or self.ranks // others)

    def _degree(self, name: str) -> int:
        return int(self._layout.get(name) or 1)

    @property
    def offload(self) -> tuple[Placement, Placement]:
        """Where optimizer states and parameters are kept."""
        stated = str(self._layout.get("offload") or "none").lower()
        place: Placement = "nvme" if "nvme" in stated else "cpu" if "cpu" in stated else "none"
        return (
            place if "optim" in stated else "none",
            place if "param" in stated else "none",
        )

    @property
    def estimator_query(self) -> EstimatorQuery | None:
        """The inputs of DeepSpeed's estimator; None if no largest layer is stated."""
        largest = self._model.get("largest_layer_params")
        if largest is None or self.parameters is None:
            return None
        optimizer, parameters = self.offload
        per_node = min(8, self.ranks)
        return EstimatorQuery(
            parameters=self.parameters,
            largest_layer=largest,
            stage=self.zero_stage,
            nodes=self.ranks // per_node,
            gpus_per_node=per_node,
            offload_optimizer=optimizer != "none",
            offload_parameters=parameters != "none",
            zero_init=self._layout.get("zero_init") != 0,
        )

    @property
    def gpu(self) -> str | None:
        """Catalogue name of the accelerator; None where it has none of this name.

        Without a stated memory, the model with 80 GB (A100, H100) or the only one.
        """
        stated = str(self._hardware["gpu"]).lower()
        family, memory = FAMILY.search(stated), MEMORY.search(stated)
        if family is None:
            return None
        size = f"{memory[1]}gb" if memory else "80gb"
        pcie = "-pcie" if "pcie" in stated else ""
        names = (f"{family[0]}-{size}{pcie}", f"{family[0]}{pcie}", family[0])
        return next((name for name in names if name in GPUS), None)

    @property
    def logs_last_rank(self) -> bool:
        """Megatron-LM logs memory since flash attention; papers before computed theirs."""
        return self.by_megatron and self._attention != "unfused"

    @property
    def by_megatron(self) -> bool:
        """Megatron ran it (and logs what is allocated); FSDP where parameters are sharded."""
        return not self._fsdp_mode and self.zero_stage < 2

    def setup(self) -> Setup:
        """The case as a setup. Raises PlanError for hardware that the catalogue lacks."""
        if self.gpu is None:
            raise PlanError(
                f"hardware.gpu: {self._hardware['gpu']!r} is not in the catalogue",
                fix=f"use one of {', '.join(GPUS)}",
            )
        per_node = min(self.ranks, usual_gpus_per_node(self.gpu))
        cluster = default_cluster(ceil(self.ranks / per_node), per_node, self.gpu)
        if network := NETWORK.search(self._notes):
            gigabytes = int(network[1]) / BITS_PER_BYTE / int(network[2])
            cluster = replace(cluster, network=link(cluster.network.kind, gigabytes))
        return self._with_recompute(Setup(self._workload(), self._plain_layout(), cluster))

    def _workload(self) -> Workload:
        """The workload; defaults are the same for all rows of an engine."""
        megatron = self.by_megatron
        composer = self._fsdp_mode != ""
        # Before flash attention, Megatron reduced gradients after the backward pass.
        early = megatron and self._attention == "unfused"
        recompute = str(self._layout.get("recompute"))
        return Workload(
            spec=self._spec(),
            sequence_length=int(self._model["seq"]),
            precision=self._dtype(),
            engine="megatron" if megatron else "fsdp",
            model="megatron" if megatron else "hf",
            attention="unfused" if self._attention == "unfused" else "fused",
            # Composer (llm-foundry) came before FlashAttention-2, and ran single operators;
            # FSDP2 (torchtitan) is compiled where the source does not say eager.
            flash_version=1 if composer else 2,
            fused_elementwise=not (composer or "eager" in self._notes),
            recomputed_layers=0.5 if "every other layer" in recompute else 1.0,
            reduce_bytes=self._reduce_bytes,
            gradient_bytes=2 if self._nemo else None,
            tensor_overlap=self._tensor_overlap(early),
            pipeline_overlap=not early,
            reduce_overlap=not early,
            # Megatron-LM's own default is 0.1; NeMo, Llama and Nemotron train without.
            dropout=megatron and self._mlp == "gelu" and not self._nemo,
            # Composer uses flash-attn's cross entropy, torchtitan PyTorch's.
            fused_loss=composer,
        )

    @property
    def _reduce_bytes(self) -> float | None:
        """Megatron-LM reduces in the precision of its buffer, which with fp16 was 16 bits."""
        if self._nemo or (self.by_megatron and self._dtype() == "fp16"):
            return 2
        return _WIRE_BYTES.get(self._fsdp_mode)

    @property
    def _nemo(self) -> bool:
        """NeMo's recipes state only degrees and batch; Megatron-LM's rows state everything.

        NeMo sums and reduces gradients in bf16 (bf16_mixed, grad_reduce_in_fp32=False).
        """
        modern = self.by_megatron and self._attention != "unfused"
        return modern and self._layout.get("recompute") is None

    @property
    def _fsdp_mode(self) -> str:
        """Composer's mixed precision mode; empty where another FSDP is used."""
        return str(self._layout.get("fsdp_mp_mode") or "")

    def _tensor_overlap(self, early: bool) -> TensorOverlap:
        """Megatron had no overlap before sequence parallel, then in the backward pass; with
        Transformer Engine and sequence parallel, in both; torchtitan has its async tensor
        parallel."""
        if "async tp" in self._notes:
            return "all"
        if not self.by_megatron:
            return "none"
        if self._layout.get("sp"):
            return "backward" if early else "all"
        return "none" if early else "backward"

    @property
    def _mlp(self) -> str:
        return str(self._model.get("mlp") or "gelu").lower()

    def _dtype(self) -> CostPrecision:
        if "fp8" in self._precision or "float8" in self._precision + self._notes:
            return "fp8"
        if "bf16" in self._precision:
            return "bf16"
        return "fp16" if "fp16" in self._precision else "fp32"

    def _spec(self) -> ModelSpec:
        """GELU models as GPT-2 has them (biases, LayerNorm, learned positions, tied head),
        gated ones as Llama has them, squared ReLU as Nemotron: Llama with LayerNorm.
        """
        model, plain = self._model, self._mlp == "gelu"
        hidden, heads, layers = (int(model[key]) for key in ("hidden", "heads", "layers"))
        ffn = int(model.get("ffn") or 4 * hidden)
        experts = int(_first(model, "experts", "num_experts") or 0)
        tied = model.get("tied")
        if tied is None:
            tied = plain and not model.get("untied")
        return ModelSpec(
            family="published",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(model.get("kv_heads") or heads),
            head_dim=int(model.get("head_dim") or hidden // heads),
            intermediate=ffn,
            vocab=int(model["vocab"]),
            max_positions=int(model["seq"]),
            tied_embeddings=bool(tied),
            experts=experts,
            experts_per_token=int(_first(model, "experts_per_token", "topk", "top_k") or 0),
            expert_intermediate=int(_first(model, "expert_ffn", "moe_ffn") or ffn),
            moe_layers=layers if experts else 0,
            gated_mlp="glu" in self._mlp,
            learned_positions=plain,
            qkv_bias=plain,
            attention_output_bias=plain,
            mlp_bias=plain,
            layer_norm="glu" not in self._mlp,
        )

    def _plain_layout(self) -> Layout:
        """The layout without recompute, and one micro batch of 1 where none is stated."""
        dp, tp, pp = self.data_parallel, self._degree("tp"), self._degree("pp")
        micro = int(self._batch.get("micro") or 1)
        accumulation = ceil(int(self._batch.get("global") or micro * dp) / (micro * dp))
        if not self.by_megatron and micro % pp == 0 and accumulation < pp:
            # torchtitan states a rank's batch, which the pipeline's schedule splits.
            micro, accumulation = micro // pp, accumulation * pp
        sequence = self._layout.get("sp")
        if sequence is None:
            sequence = tp > 1 and self._attention != "unfused"
        optimizer, parameters = self.offload
        return Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            vpp=self._chunks(pp),
            cp=self._degree("cp"),
            # Transformer Engine's default (`cp_comm_type`: p2p) is a ring.
            exchange="all_gather" if "all-gather" in self._notes else "ring",
            ep=self._degree("ep"),
            sequence_parallel=bool(sequence),
            zero_stage=self.zero_stage,  # type: ignore[arg-type]
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            micro_batch=micro,
            gradient_accumulation=accumulation,
        )

    def _chunks(self, pp: int) -> int:
        """Stated, or Megatron's interleaving down to two layers."""
        stated = self._layout.get("vpp")
        if stated is not None or pp == 1:
            return int(stated or 1)
        if not self.by_megatron or self._attention == "unfused":
            return 1
        return max(1, int(self._model["layers"]) // (LAYERS_PER_CHUNK * pp))

    def _with_recompute(self, setup: Setup) -> Setup:
        """The stated recompute; otherwise none, or the least with which the allocations fit on
        the device."""
        stated = self._layout.get("recompute")
        choices: tuple[Recompute, ...] = ("none", "selective", "full")
        if stated is not None:
            word = str(stated).lower()
            named = "full" if "every other layer" in word else word.split("(")[0]
            choices = tuple(one for one in choices if one == named)
            if not choices:
                raise PlanError(
                    f"layout.recompute: {stated!r} is not known",
                    fix="use none, selective, full or selective(every other layer)",
                )
        capacity = setup.cluster.gpu.memory_gib
        for recompute in choices:
            one = replace(setup, layout=replace(setup.layout, recompute=recompute))
            needed = peak_memory(one.workload, one.layout).allocated
            if capacity is None or needed <= capacity * GIB:
                break
        return one


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is stated: sources name them differently."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)
