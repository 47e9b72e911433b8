"""Predicts published cases: `python benchmarks/published.py CASES.json --out RESULTS.json`.

A case states a model by its shape, its hardware, layout and batch; fields that a source did not
state get one default per engine, below. What a case reports is never read. A result is {"id",
"step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits", "unsupported"}: the total
of `memory_gib` is what the engine's own log shows, `unsupported` why there is no prediction.
"""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from toolkit.errors import PlanError
from toolkit.layout import CostPrecision, Layout, Placement, Recompute
from toolkit.models.spec import ModelSpec, ParameterCounts
from toolkit.plan.cost.memory import peak_memory, stage_memory
from toolkit.plan.cost.workload import Setup, Workload
from toolkit.plan.estimate import estimate, result
from toolkit.plan.hardware.catalogue import GPUS, link
from toolkit.plan.hardware.cluster import default_cluster, usual_gpus_per_node
from toolkit.text.units import GIB

SHAPE = ("layers", "hidden", "heads", "vocab", "seq")
LAYERS_PER_CHUNK = 2
"""Layers of a pipeline chunk if a source does not state the interleaving."""
FAMILY = re.compile(r"gb\d{3}|b\d{3}|h\d{3}|a\d{3}|v\d{3}|mi\d{3}x", re.IGNORECASE)
MEMORY = re.compile(r"(\d+)\s*gb", re.IGNORECASE)
NETWORK = re.compile(r"inter-node (\d+) gb/s per (\d+)-gpu node")
BITS_PER_BYTE = 8
_WIRE_BYTES = {"PURE": 2, "DEFAULT": 4}
"""Composer's mixed precision modes: what gradients are reduced in."""
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(("id", "step_time_s", "tokens_per_s_per_gpu", "mfu")),
    "memory_gib": {},
    **dict.fromkeys(("fits", "unsupported")),
}


def main() -> None:
    """Predict every case of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = [predict(case) for case in json.loads(arguments.cases.read_text("utf-8"))]
    arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    answered = sum(one["unsupported"] is None for one in results)
    print(f"{answered} of {len(results)} cases answered in {arguments.out}")


def predict(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one case.

    Memory is what the engine's own log shows, because that is what sources publish: torchtitan
    the reserved memory of the worst rank, Megatron-LM the allocated memory, since flash
    attention of the last rank only. Whether it fits is decided by the fullest rank's total.
    """
    case = Case(fields)
    try:
        setup = case.setup()
    except PlanError as error:
        return _EMPTY | {"id": fields["id"], "unsupported": str(error)}
    found = estimate(*setup[:3])
    memory, total = found.memory, found.memory.reserved
    if case.by_megatron:
        if not case.unfused:
            memory = stage_memory(setup.workload, setup.layout, setup.layout.pp - 1)
        total = memory.allocated
    return _EMPTY | {"id": fields["id"]} | result(found, memory, total)


class Case:
    """A published case, with words for what its fields mean."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: the case as its file has it; what it reports is left behind here."""
        self._model: Mapping[str, Any] = fields["model"]
        self._layout: Mapping[str, Any] = fields["layout"]
        self._batch: Mapping[str, Any] = fields.get("batch") or {}
        self._hardware: Mapping[str, Any] = fields["hardware"]
        self._notes = str(fields.get("notes") or "").lower()
        self._mlp = str(self._model.get("mlp") or "gelu").lower()
        self.unfused = fields.get("attention_kernel") == "unfused"
        zero = int(self._layout.get("zero_stage") or 0)
        self._composer = str(self._layout.get("fsdp_mp_mode") or "")
        """llm-foundry's mixed precision mode; empty where another FSDP is used."""
        self.by_megatron = not self._composer and zero < 2
        """Megatron ran it; FSDP where gradients or parameters are sharded."""
        self._zero = zero
        # NeMo's recipes state only degrees and batch; Megatron-LM's rows state everything.
        modern = self.by_megatron and not self.unfused
        self._nemo = modern and self._layout.get("recompute") is None
        precision = str(fields.get("precision") or "bf16").lower()
        named: tuple[CostPrecision, ...] = ("bf16", "fp16")
        self._dtype: CostPrecision = next((one for one in named if one in precision), "fp32")
        if "fp8" in precision or "float8" in precision + self._notes:
            self._dtype = "fp8"

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

    def setup(self) -> Setup:
        """The case as a setup. Raises PlanError for hardware that the catalogue lacks, and for
        a model of which only the number of parameters is known."""
        if any(self._model.get(key) is None for key in SHAPE):
            raise PlanError("model: its shape is not stated", fix=f"state {', '.join(SHAPE)}")
        if self.gpu is None:
            raise PlanError(
                f"hardware.gpu: {self._hardware['gpu']!r} is not in the catalogue",
                fix=f"use one of {', '.join(GPUS)}",
            )
        ranks = int(self._hardware["n_gpus"])
        per_node = min(ranks, usual_gpus_per_node(self.gpu))
        cluster = default_cluster(ceil(ranks / per_node), per_node, self.gpu)
        if network := NETWORK.search(self._notes):
            gigabytes = int(network[1]) / BITS_PER_BYTE / int(network[2])
            cluster = replace(cluster, network=link(cluster.network.kind, gigabytes))
        return self._with_recompute(Setup(self._workload(), self._plain_layout(ranks), cluster))

    def _workload(self) -> Workload:
        """The workload; defaults are the same for all rows of an engine."""
        megatron, composer = self.by_megatron, self._composer != ""
        # Before flash attention, Megatron reduced gradients after the backward pass.
        early = megatron and self.unfused
        # Megatron-LM reduces in the precision of its buffer, which with fp16 was 16 bits; NeMo
        # sums and reduces in bf16 (bf16_mixed, grad_reduce_in_fp32=False).
        reduced = 2 if self._nemo or (megatron and self._dtype == "fp16") else None
        return Workload(
            spec=self._spec(),
            sequence_length=int(self._model["seq"]),
            precision=self._dtype,
            engine="megatron" if megatron else "fsdp",
            model="megatron" if megatron else "hf",
            attention="unfused" if self.unfused else "fused",
            # Composer (llm-foundry) came before FlashAttention-2, and ran single operators;
            # FSDP2 (torchtitan) is compiled where the source does not say eager.
            flash_version=1 if composer else 2,
            fused_elementwise=not (composer or "eager" in self._notes),
            reduce_bytes=reduced or _WIRE_BYTES.get(self._composer),
            reduce_overlap=not early,
            # Megatron-LM's own default is 0.1; NeMo, Llama and Nemotron train without.
            dropout=megatron and self._mlp == "gelu" and not self._nemo,
            # Composer uses flash-attn's cross entropy, torchtitan PyTorch's.
            fused_loss=composer,
        )

    def _spec(self) -> ModelSpec:
        """GELU models as GPT-2 has them (biases, LayerNorm, learned positions, tied head),
        gated ones as Llama has them, squared ReLU as Nemotron: Llama with LayerNorm.
        """
        model, plain = self._model, self._mlp == "gelu"
        hidden, heads, layers = (int(model[key]) for key in ("hidden", "heads", "layers"))
        ffn = int(model.get("ffn") or 4 * hidden)
        experts = int(_first(model, "experts", "num_experts") or 0)
        tied = model.get("tied")
        kv_heads = int(model.get("kv_heads") or heads)
        head_dim = int(model.get("head_dim") or hidden // heads)
        projections = layers * 2 * hidden * head_dim * (heads + kv_heads)
        of_token = int(_first(model, "experts_per_token", "topk", "top_k") or 0)
        inner = int(_first(model, "expert_ffn", "moe_ffn") or ffn)
        mlp = (3 if "glu" in self._mlp else 2) * hidden * (inner if experts else ffn)
        vocab, positions = int(model["vocab"]), int(model["seq"])
        tied = plain and not model.get("untied") if tied is None else bool(tied)
        biases = (head_dim * (heads + 2 * kv_heads) + hidden) * plain
        ends = hidden * (1 if "glu" in self._mlp else 2)
        parts = ParameterCounts(
            embedding=vocab * hidden,
            position_embedding=positions * hidden * plain,
            attention=projections + layers * biases,
            mlp=0 if experts else layers * (mlp + (ffn + hidden) * plain),
            router=layers * experts * hidden,
            experts=layers * experts * mlp,
            inactive_experts=layers * max(experts - of_token, 0) * mlp,
            norms=(2 * layers + 1) * ends,
            lm_head=0 if tied else vocab * hidden,
        )
        used = layers * (mlp * (of_token if experts else 1) + experts * hidden)
        return ModelSpec(
            family="published",
            parameters=parts,
            flops=2.0 * (projections + used + vocab * hidden),
            score_flops=4.0 * heads * head_dim * layers,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=ffn,
            vocab=vocab,
            max_positions=positions,
            tied_embeddings=tied,
            experts=experts,
            experts_per_token=of_token,
            expert_intermediate=inner,
            moe_layers=layers if experts else 0,
            gated_mlp="glu" in self._mlp,
            learned_positions=plain,
            qkv_bias=plain,
            attention_output_bias=plain,
            mlp_bias=plain,
            layer_norm="glu" not in self._mlp,
        )

    def _plain_layout(self, ranks: int) -> Layout:
        """The layout without recompute, and one micro batch of 1 where none is stated."""
        tp, pp, cp, ep = (int(self._layout.get(one) or 1) for one in ("tp", "pp", "cp", "ep"))
        dp = int(self._layout.get("dp") or ranks // (tp * pp * cp))
        micro = int(self._batch.get("micro") or 1)
        accumulation = ceil(int(self._batch.get("global") or micro * dp) / (micro * dp))
        if not self.by_megatron and micro % pp == 0 and accumulation < pp:
            # torchtitan states a rank's batch, which the pipeline's schedule splits.
            micro, accumulation = micro // pp, accumulation * pp
        sequence = self._layout.get("sp")
        if sequence is None:
            sequence = tp > 1 and not self.unfused
        offload = str(self._layout.get("offload") or "none").lower()
        place: Placement = (
            "nvme" if "nvme" in offload else "cpu" if "cpu" in offload else "none"
        )
        return Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            vpp=self._chunks(pp),
            cp=cp,
            ep=ep,
            sequence_parallel=bool(sequence),
            zero_stage=self._zero,  # type: ignore[arg-type]
            offload_optimizer=place if "optim" in offload else "none",
            offload_parameters=place if "param" in offload else "none",
            micro_batch=micro,
            gradient_accumulation=accumulation,
        )

    def _chunks(self, pp: int) -> int:
        """Stated, or Megatron's interleaving down to two layers."""
        stated = self._layout.get("vpp")
        if stated is not None or pp == 1 or not self.by_megatron or self.unfused:
            return int(stated or 1)
        return max(1, int(self._model["layers"]) // (LAYERS_PER_CHUNK * pp))

    def _with_recompute(self, setup: Setup) -> Setup:
        """The stated recompute; otherwise none, or the least with which the allocations fit on
        the device."""
        stated = self._layout.get("recompute")
        choices: tuple[Recompute, ...] = ("none", "selective", "full")
        if stated is not None:
            word, _, rest = str(stated).lower().partition("(")
            choices = tuple(one for one in choices if one == word)
            if not choices or rest.startswith("every other"):
                raise PlanError(
                    f"layout.recompute: {stated!r} is not known",
                    fix="use none, selective or full",
                )
        capacity = setup.cluster.gpu.memory_gib
        for recompute in choices:
            one = setup._replace(layout=replace(setup.layout, recompute=recompute))
            memory = peak_memory(one.workload, one.layout)
            # NeMo's recipes sum gradients in 16 bits instead of 32.
            needed = memory.allocated - self._nemo * memory["gradients"] / 2
            if capacity is None or needed <= capacity * GIB:
                break
        return one


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is stated: sources name them differently."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


if __name__ == "__main__":
    main()
