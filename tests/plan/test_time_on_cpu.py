"""What differs on a processor: nothing runs beside the host, and small products are fast."""

from toolkit.hardware.catalogue import gpu
from toolkit.models.families import model_spec
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.layer import Slice
from toolkit.plan.cost.operators import device, layer_time, matmul_s
from toolkit.plan.cost.workload import Workload

SPEC = model_spec(
    {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
)
WORKLOAD = Workload(SPEC, 128, "fp32", "ddp", fused_elementwise=False)
CPU, GPU = (device(gpu(name), WORKLOAD, DEFAULT) for name in ("cpu", "a100-80gb"))


def rate(k: int, on_gpu: bool) -> float:
    """Share of the large products' rate that an inner size of k reaches."""
    chosen = GPU if on_gpu else CPU
    large = 2.0 * 8192**3 / matmul_s(8192, 8192, 8192, chosen)
    return 2.0 * 8192**2 * k / matmul_s(8192, 8192, k, chosen) / large


def test_small_inner_sizes_cost_a_processor_little() -> None:
    assert rate(128, on_gpu=False) > 0.9
    assert rate(128, on_gpu=True) < 0.6


def test_operators_are_started_one_after_the_other() -> None:
    """Few or many tokens, a layer's operators take the same time to start."""
    few, many = (
        layer_time(WORKLOAD, Slice(tokens, 1, 1, 1, False), "none", CPU)
        for tokens in (8, 65536)
    )
    assert few.forward.launch == many.forward.launch
    assert 0.3e-3 < few.forward.launch < 1e-3
    assert few.backward.launch == 2 * few.forward.launch
