"""The hand-written megatron-core loop that `overhead.py` compares `dmt` with.

    torchrun --nproc-per-node 2 benchmarks/bare_megatron.py RUN_DIR STEPS DONE

Model, layout and optimizer are those of a run directory (TP 2), built from megatron-core's
own layer specification; the data are random tokens that lie in memory. No validation,
logging or checkpoint. Of DMT it uses only what lets megatron-core run without CUDA.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ruamel.yaml import YAML

from toolkit.models.megatron import cpu

cpu.before_import()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def summed_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    tokens = torch.tensor(losses.numel(), dtype=torch.int)
    return losses.sum(), tokens, {"loss": losses.detach().sum()}


def forward(batches, model):
    tokens, positions, labels = next(batches)
    return model(tokens, positions, None, labels=labels), partial(summed_loss)


def main() -> None:
    run, steps, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    training = YAML(typ="safe").load(run / "recipe.yaml")["training"]
    layout = json.loads((run / "plan.json").read_text())["layout"]
    settings = json.loads((run / "megatron.json").read_text())
    micro, accumulation = layout["micro_batch"], layout["gradient_accumulation"]
    length = training["sequence_length"]

    dist.init_process_group("gloo")
    cpu.redirect()
    parallel_state.initialize_model_parallel(layout["tp"], create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    activation = torch.nn.functional.silu
    dtypes = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    transformer = settings["transformer"] | dtypes | {"activation_func": activation}
    config = TransformerConfig(**transformer, bias_dropout_fusion=False)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, **settings["gpt"])
    replica = DistributedDataParallel(
        config, DistributedDataParallelConfig(**settings["ddp"]), model
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = replica.no_sync
    optimizer_config = OptimizerConfig(
        **settings["optimizer"] | {"params_dtype": torch.float32}
    )
    with cpu.cuda_type_names():
        optimizer = get_megatron_optimizer(
            optimizer_config, [replica], get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )  # fmt: skip
    positions = torch.arange(length).expand(micro, length)
    run_schedule = get_forward_backward_func()
    for step in range(steps):
        replica.zero_grad_buffer()
        optimizer.zero_grad()
        batches = []
        for _ in range(accumulation):
            tokens = torch.randint(settings["gpt"]["vocab_size"], (micro, length))
            batches.append((tokens, positions, tokens))
        run_schedule(
            forward_step_func=forward, data_iterator=iter(batches), model=replica,
            num_microbatches=accumulation, seq_length=length, micro_batch_size=micro,
            forward_only=False,
        )  # fmt: skip
        with cpu.cuda_type_names():
            optimizer.step()
        if dist.get_rank() == 0 and step in (0, steps - 1):
            done.with_suffix(".last" if step else ".first").touch()


if __name__ == "__main__":
    main()
