"""The planner's formulas, one row for each number of a plan.

A row's text is compiled once and is the computation: its value, what `dmt plan --explain`
prints and the bars are the same row. `memory.py` and `time.py` count the symbols that rows
start from. The value of a row is a symbol of those below it. Names end with the unit:
`x_bytes`, `x_s`, `x_bytes_per_s`. Parts of the memory are in bytes, of the step in seconds.
"""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any, NamedTuple

ZERO = "ZeRO, arXiv:1910.02054, figure 1"
KORTHIKANTI = "what autograd keeps: Korthikanti et al., arXiv:2205.05198, equations 1 to 6"
SCHEDULE = "1F1B: Narayanan et al., arXiv:2104.04473, section 2.2"
RING = "a ring moves (n - 1)/n of the data: Thakur et al. 2005"
OFFLOAD = "ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857"
PALM = "PaLM, arXiv:2204.02311, appendix B; attention counted as masked"
_FUNCTIONS = {"__builtins__": {}, "max": max, "sqrt": sqrt, "log": log}


class Term(NamedTuple):
    """A number and its formula."""

    name: str
    formula: str
    """An expression over symbols, in Python's syntax."""
    source: str = ""
    part: str = ""
    """The part of the memory or of the step that it is. Empty for a symbol of other rows."""

    @property
    def names(self) -> list[str]:
        """The symbols of the formula."""
        code = compile(self.formula, self.name, "eval")
        return [name for name in code.co_names if name not in _FUNCTIONS]


class Formulas:
    """Rows that are computed together, in order."""

    def __init__(self, *rows: Term) -> None:
        self.rows = rows
        lines = (f"{row.name} = {row.formula}" for row in rows)
        self._code = compile("\n".join(lines), __file__, "exec")

    def __add__(self, other: "Formulas") -> "Formulas":
        return Formulas(*self.rows, *other.rows)

    def evaluate(self, symbols: dict[str, float]) -> dict[str, float]:
        """`symbols`, with the value of every row added."""
        exec(self._code, _FUNCTIONS, symbols)
        return symbols

    def parts(self, symbols: Mapping[str, float]) -> dict[str, float]:
        """The values of the rows that are parts."""
        return {row.part: symbols[row.name] for row in self.rows if row.part}

    def derivations(self, symbols: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Every row that is not zero, by name: its part, value, formula and source, and the
        values of its symbols."""
        return {
            row.name: {
                "part": row.part,
                "value": symbols[row.name],
                "formula": row.formula,
                "source": row.source,
                "symbols": {name: symbols[name] for name in row.names},
            }
            for row in self.rows
            if symbols[row.name]
        }


PRESENT = Formulas(
    Term("weights", "weight_bytes * (dense / weight_ranks + experts / weight_expert_ranks)",
         ZERO, "weights"),
    Term("gradients", "gradient_bytes * (trained_dense / gradient_ranks + trained_experts / "
         "gradient_expert_ranks)", ZERO, "gradients"),
    Term("optimizer", "optimizer_bytes * (trained_dense / optimizer_ranks + trained_experts / "
         "optimizer_expert_ranks) - saved_bytes", ZERO, "optimizer"),
    Term("layer_bytes", "norms_bytes + qkv_bytes + attention_bytes + mlp_bytes + experts_bytes",
         KORTHIKANTI),
    Term("activations", "waiting * (recomputed * layer_bytes + whole * whole_layer_bytes + "
         "mask_bytes)", SCHEDULE, "activations"),
    Term("logits", "2 * stream_bytes + logit_bytes * tokens * vocabulary / loss_chunks + "
         "head_gradient_bytes", "how the loss is computed: counted", "logits and loss"),
    Term("workspace", "again_bytes + layer_gradient_bytes",
         "gradients in one layer's backward pass, next to what it recomputed",
         "one layer's backward"),
)  # fmt: skip
"""What may be on a rank at the peak of a step."""

PEAK = Formulas(
    Term("buffers", "message_bytes + engine_bytes + stacked_bytes + owner_bytes",
         "messages of groups and stages; the engine's buckets and gathered weights; experts",
         "buffers"),
    Term("allocated_bytes", "weights + gradients + optimizer + activations + logits + workspace"
         " + buffers"),
    Term("reserve", "idle_bytes + reserve_share * (allocated_bytes + idle_bytes)",
         "what PyTorch's allocator holds besides", "allocator reserve"),
    Term("context", "cuda_bytes + communicators * communicator_bytes",
         "memory of the device outside of the allocator", "CUDA and NCCL"),
    Term("total_bytes", "allocated_bytes + reserve + context"),
)  # fmt: skip
"""Memory of one rank at the peak, from what is there."""
MEMORY = PRESENT + PEAK

LAYER = Formulas(
    Term("tensor_s", "4 * tensor_bytes * (tensor - 1) / tensor / "
         "tensor_bytes_per_s", "two all-reduces, or gathers and scatters, in each pass: "
         "Korthikanti et al., arXiv:2205.05198, section 4.2.2"),
    Term("context_s", "context_bytes / context_bytes_per_s",
         "keys and values gathered (Llama 3, arXiv:2407.21783, section 3.3.2), or heads sent "
         "(DeepSpeed Ulysses, arXiv:2309.14509, section 3.1)"),
    Term("expert_s", "expert_bytes / expert_bytes_per_s",
         "tokens to their experts and back, at the slower of both links"),
    Term("forward_s", "forward_matmul_s + forward_attention_s + forward_elementwise_s + "
         "forward_launch_s + tensor_s + context_s + expert_s"),
    Term("backward_s", "backward_matmul_s + backward_attention_s + backward_elementwise_s + "
         "backward_launch_s + tensor_back * tensor_s + context_s + expert_s"),
    Term("again_s", "again_matmul * forward_matmul_s + again_attention * forward_attention_s + "
         "again_elementwise * forward_elementwise_s + again_launch * forward_launch_s",
         "the part of a forward pass that the backward pass repeats"),
    Term("repeated_s", "again_s + tensor_again * tensor_s + context_again * context_s + "
         "expert_again * expert_s"),
    Term("head_s", "head_forward_s + head_backward_s",
         "the head's products, and the loss's reads and writes per logit"),
)  # fmt: skip
"""Seconds of one layer, or the head, for one micro batch."""

STEP = Formulas(
    Term("matmul", "micro_batches * layers * (forward_matmul_s + backward_matmul_s)",
         "a product with inner size k reaches k / (k + half_k) of the rate", "matmul"),
    Term("attention", "micro_batches * layers * (forward_attention_s + backward_attention_s)",
         "FlashAttention-2, arXiv:2307.08691", "attention"),
    Term("elementwise", "micro_batches * layers * (forward_elementwise_s + "
         "backward_elementwise_s)", "operands read and written by norms, sums, rotary, "
         "activation function, at the memory's rate", "elementwise"),
    Term("launch", "micro_batches * layers * (forward_launch_s + backward_launch_s)",
         "gaps between kernels", "launch"),
    Term("recompute", "micro_batches * recomputed * again_s", "", "recompute"),
    Term("logits", "micro_batches * last * head_s", "", "logits"),
    Term("waiting_tensor", "micro_batches * tensor_s * (layers * (1 + tensor_back) + recomputed"
         " * tensor_again)", "", "waiting: tensor"),
    Term("waiting_context", "micro_batches * context_s * (2 * layers + recomputed * "
         "context_again)", "", "waiting: context"),
    Term("waiting_expert", "micro_batches * expert_s * (2 * layers + recomputed * "
         "expert_again)", "", "waiting: expert"),
    Term("messages", "2 * (chunks * micro_batches * pipeline_waited + stages - 1)",
         f"an activation and a gradient per chunk: {SCHEDULE}"),
    Term("waiting_pipeline", "messages * pipeline_bytes / pipeline_bytes_per_s", "",
         "waiting: pipeline"),
    Term("gather_s", "gathered_bytes * (data - 1) / data / data_bytes_per_s", RING),
    Term("waiting_gather", "gathers * max(gather_s - beside_forward_s, gather_slows * "
         "gather_s)", "weights: what computation does not hide, or by how much it is slowed "
         "down", "waiting: data_gather"),
    Term("reduce_s", "(gathered_again_bytes + reduced_bytes) * (data - 1) / data / "
         "data_bytes_per_s", RING),
    Term("copies_s", "2 * copied_bytes * (replicas - 1) / replicas / replica_bytes_per_s",
         RING),
    Term("waiting_reduce", "reductions * max(reduce_s - beside_backward_s, reduce_slows * "
         "reduce_s) + max(copies_s - stage_backward_s, copies_slow * copies_s)",
         "gradients, and weights that ZeRO-3 gathers again", "waiting: data_reduce"),
    Term("bubble", "other_stages_s / chunks",
         f"one micro batch on each other stage: {SCHEDULE}", "pipeline bubble"),
    Term("update", "update_bytes * updated / update_bytes_per_s",
         "bytes of AdamW per parameter, read and written", "optimizer"),
    Term("out_s", "loaded_bytes / loading_bytes_per_s", "weights, for each pass"),
    Term("back_s", "out_s + sums_bytes / host_bytes_per_s", "and sums of gradients"),
    Term("last_s", "back_s + last_sums_bytes / host_bytes_per_s"),
    Term("disk_s", "states_bytes / disk_bytes_per_s"),
    Term("offload", "micro_batches * max(out_s - stage_forward_s, host_slows * out_s) + "
         "(micro_batches - 1) * max(back_s - stage_backward_s, host_slows * back_s) + "
         "max(last_s - stage_backward_s, host_slows * last_s) + "
         "returned_bytes / host_bytes_per_s + max(0, disk_s - update)", OFFLOAD, "offload"),
    Term("computed_s", "matmul + attention + elementwise + launch + recompute + logits + "
         "bubble"),
    Term("overhead", "spread * sqrt(2 * log(nodes)) * computed_s",
         "waiting for the slowest node, whose speeds spread", "overhead"),
)  # fmt: skip
"""Seconds of one optimizer step on the busiest stage."""

UTILIZATION = Formulas(
    Term("utilization", "tokens * flops_per_token / (step_s * gpus * peak_flops_per_s)", PALM,
         "MFU"),
)  # fmt: skip
"""Model FLOPs utilization."""
