"""Settings and commands of earlier releases that are gone, and what to do instead.

Recipes and scripts outlive a release: a name that was removed ends in one error that names its
replacement, and an old run whose stored recipe leaves the setting unset continues.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_EXPORT = "`dmt checkpoint export RUN FOLDER`"
_HARNESS = "`lm_eval --model hf --model_args pretrained=FOLDER --tasks NAMES`"

_LESS_MEMORY = "state memory_gib in a cluster file, and name that with --cluster"

SETTINGS: dict[str, str] = {
    "data.streaming": "remove it: all text is tokenised first, ahead with `dmt data prepare`",
    **{
        f"data.{side}.{key}": instead
        for side in ("train", "validation")
        for key, instead in {
            "at_end": "remove it, and set training.steps: `dmt data show` prints the passes "
            "over each source",
            "malformed_limit": "remove it: `dmt data prepare` counts what is dropped",
            "row_limit_mib": "remove it; write rows of more than 128 MiB as Parquet",
        }.items()
    },
    "data.remote_cache_gib": "remove it: a pair of token files at a URL is copied into "
    "data.cache once",
    "training.batch_ramp.tokens": "write training.batch_ramp.steps, after which the batch is "
    "whole",
    "data.stages.from_tokens": "write from_step: tokens / (training.global_batch_size · "
    "training.sequence_length)",
    "data.stages.sequence_length": "train each length as a run of its own: the second with its "
    "training.sequence_length, `model.init: checkpoint` and `model.checkpoint: FOLDER`, a "
    "checkpoint of the first",
    **{
        f"parallel.zero.{key}": f"write {name} in a DeepSpeed file, and its path in "
        "parallel.zero.config"
        for key, name in {
            "hpz": "zero_optimization.zero_hpz_partition_size",
            "quantized_weights": "zero_optimization.zero_quantized_weights",
            "quantized_gradients": "zero_optimization.zero_quantized_gradients",
            "bf16_optimizer_states": "bf16.bf16_optimizer_states and "
            "bf16.bf16_master_weights_and_grads",
        }.items()
    },
    "parallel.offload_activations": "remove it; recompute, `parallel.context` and "
    "`kernels.loss: chunked` save memory of long sequences",
    "kernels.mlp": "remove it; `parallel.context` saves memory of long sequences",
    "model.resize_embeddings": "add rows to a copy once: model = AutoModelForCausalLM."
    "from_pretrained(HUB); model.resize_token_embeddings(N); model.save_pretrained(FOLDER); "
    "and state model.hub: FOLDER",
    "adapter.name": "remove it: adapters are LoRA's",
    "adapter.init": "remove it: A starts uniform within ±1/√(its columns), PEFT's default",
    "adapter.folder": "state as model.hub the merged model: `dmt checkpoint export RUN NEW "
    "--merged`, or PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload()."
    "save_pretrained(NEW)",
    "fp8": "write `kernels: {fp8: rowwise}`",
    "parallel.overlap": "remove it: engines communicate while they compute",
    "parallel.outer.batch": "remove it: training.global_batch_size is that of each replica",
    "parallel.outer.optimizer": "remove it: updates are SGD's with Nesterov's momentum; for "
    "the mean of the weights state learning_rate: 1 and momentum: 0",
    "parallel.outer.staleness": "remove it: no replica is more than one round behind",
    "parallel.outer.compress": "remove it: changes of weights are sent in fp32",
    **{
        f"parallel.outer.{key}": "start `torchft_lighthouse --min_replicas 1`, and set "
        "TORCHFT_LIGHTHOUSE=http://HOST:29510 in the environment"
        for key in ("holder", "lighthouse")
    },
    "parallel.outer.link": "remove it: `dmt plan` prints the bytes of an exchange",
    **{
        f"schedule.plateau.{key}": f"remove it: it is torch's default, {value}"
        for key, value in {"threshold": "0.0001", "cooldown": "0"}.items()
    },
    "optimizer.layer_decay": "state the rates in `optimizer.groups`, a group for each layer",
    "optimizer.muon": "remove it: the momentum is 0.95, and Nesterov's",
    "optimizer.adafactor": "remove it; `optimizer.name: adamw_8bit` has moments of 8 bits",
    "cluster.memory_fraction": _LESS_MEMORY,
    "cluster.groups": "remove it, and plan for machines of one kind; `parallel.balance: auto` "
    "moves samples to faster ranks",
    "parallel.shares": "remove it; `parallel.balance: auto` measures ranks, and moves samples "
    "to the faster ones",
    "parallel.zero.extra": "write the keys into a copy of a file of ds_configs/, and name it "
    "in parallel.zero.config",
    "checkpoint.resume": "remove it; a run continues, and --run-dir NEW begins another one",
    "checkpoint.memory": "save to storage more often (checkpoint.every_steps); saves are "
    "asynchronous",
    **{
        f"launch.slurm.{key}": f"write it in launch.slurm.options, as --{option}=VALUE"
        for key, option in {
            "partition": "partition",
            "account": "account",
            "qos": "qos",
            "time_limit": "time",
            "cpus_per_node": "cpus-per-task",
        }.items()
    },
    "launch.slurm.setup": "source it before `dmt launch`: sbatch passes your environment on",
    "launch.slurm.requeue": "write --no-requeue in launch.slurm.options, or remove it for true",
    "launch.slurm.stop_before_s": "write --signal=B:USR1@SECONDS in launch.slurm.options, or "
    "remove it for 300",
    "launch.kubernetes.namespace": "kubectl config set-context --current --namespace=NAME",
    "launch.ray": "set RAY_ADDRESS in the environment",
    "launch.start_timeout_s": "remove it: ranks may be without progress for two hours",
    "launch.hostfile": "`deepspeed --hostfile FILE launch/train.py RECIPE`, or `dmt launch` on "
    "each machine with launch.rendezvous (docs/launchers.md)",
    **{
        f"launch.kubernetes.{key}": f"write it in launch.kubernetes.pod, as {instead}"
        for key, instead in {
            "resources": "`containers: [{resources: …}]`",
            "container": "`containers: [{…}]`",
            "env_from": "`containers: [{envFrom: [{secretRef: {name: NAME}}]}]`",
            "gpu_resource": "`containers: [{resources: {limits: {NAME: N}}}]`; a NAME like "
            "amd.com/gpu replaces nvidia.com/gpu",
        }.items()
    },
    **{
        f"launch.kubernetes.{key}": f"remove it: {always}, or change the manifest that "
        "`dmt render RECIPE --to kubernetes` prints"
        for key, always in {
            "kind": "the job is a plain Job, which needs no operator",
            "runtime": "a plain Job has none",
            "mount_path": "the volume is mounted at /dmt",
            "labels": "the job has none",
        }.items()
    },
    "launch.spares": "remove it: machines beyond launch.elastic.max_nodes wait",
    "launch.remote_start": "`deepspeed --hostfile FILE --launcher NAME launch/train.py RECIPE`",
    "launch.mpi": "`mpirun OPTIONS python launch/train.py RECIPE` (docs/launchers.md)",
    "guard.max_skips_in_a_row": "remove it: 20 skipped steps in a row end a run",
    "evaluation.early_stopping": "write evaluation.patience: N, in validations without a lower "
    "loss",
    "evaluation.tasks": f"remove it; {_EXPORT}, then {_HARNESS} (docs/checkpoints.md)",
    **{
        f"logging.{name}": f"write logging.trackers: [{name}]{more}"
        for name, more in {
            "wandb": " and logging.project, and set WANDB_MODE=online, WANDB_ENTITY or "
            "WANDB_TAGS in the environment if you need them",
            "tensorboard": "",
            "mlflow": " and logging.project, and set MLFLOW_TRACKING_URI in the "
            "environment if you need it",
            "trackio": " and logging.project",
        }.items()
    },
    "logging.samples": "remove it; the seed alone decides the order of samples (docs/data.md)",
    "evaluation.samples": f"remove it; {_EXPORT}, and generate with transformers",
}
"""What to do instead of a removed setting, by its dotted path without indices."""

_OWN_COMMAND = "(docs/launchers.md has the whole line, also for several machines)"

VALUES: dict[str, dict[str, str]] = {
    "adapter.targets": {"experts": "write attention: experts have no adapters any more"},
    "launch.launcher": {
        "deepspeed": f"`deepspeed --num_gpus N launch/train.py RECIPE` {_OWN_COMMAND}",
        "accelerate": "`accelerate launch --num_processes N launch/train.py RECIPE` "
        + _OWN_COMMAND,
        "torchrun": "write local, also with launch.rendezvous; or "
        f"`torchrun --nproc-per-node N launch/train.py RECIPE` {_OWN_COMMAND}",
        "mpi": f"`mpirun -np N python launch/train.py RECIPE` {_OWN_COMMAND}",
    },
}
"""What to do instead of a removed value of a setting."""

DEFAULTS: dict[str, object] = {
    "cluster.memory_fraction": 1.0,
    "launch.start_timeout_s": 7200.0,
    "checkpoint.resume": "auto",
    "adapter.name": "lora",
    "data.train.at_end": "repeat",
    "data.validation.at_end": "repeat",
    "parallel.overlap": "auto",
    "launch.slurm.requeue": True,
    "launch.slurm.stop_before_s": 300,
    "launch.kubernetes.namespace": "default",
    "guard.max_skips_in_a_row": 20,
    "logging.samples": False,
    "cluster.groups": [],
    "parallel.shares": [],
    "data.remote_cache_gib": 50.0,
    "data.train.row_limit_mib": 128,
    "data.validation.row_limit_mib": 128,
    "adapter.init": "kaiming",
    "schedule.plateau.threshold": 1e-4,
    "schedule.plateau.cooldown": 0,
    "launch.ray": {"address": None},
    "logging.tensorboard": False,
    "kernels.mlp": "whole",
    "parallel.offload_activations": False,
    "launch.remote_start": "pdsh",
    "launch.spares": 0,
    "launch.kubernetes.gpu_resource": "nvidia.com/gpu",
    "launch.kubernetes.kind": "pytorchjob",
    "launch.kubernetes.runtime": "torch-distributed",
    "launch.kubernetes.mount_path": "/dmt",
    "optimizer.muon": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr": "match_rms_adamw",
    },
    "launch.mpi": {"command": "mpirun", "options": []},
    "parallel.zero.hpz": 1,
    "parallel.zero.quantized_weights": False,
    "parallel.zero.quantized_gradients": False,
    "parallel.zero.bf16_optimizer_states": False,
}
"""Defaults of removed settings, where they were not null."""

COMMANDS: dict[str, str] = {
    "data stats": "use `dmt data show`, which prints documents, tokens and lengths",
    "checkpoint import --samples": "leave it out; no one knows which samples were seen",
    "data verify": "start the run, which makes damaged entries of the cache again",
    "data tokenizer": "train it with `tokenizers`, as docs/data.md shows",
    "estimate": "use `dmt plan`, which prints memory and time by part",
    "plan --mtbf": "save every sqrt(2 * seconds that a save stops training * seconds between "
    "failures), docs/checkpoints.md",
    "plan --memory-fraction": _LESS_MEMORY,
    "plan --check-memory": "use `dmt rehearse RECIPE --gpu`",
    "plan --html": "use `dmt plan RECIPE --explain`",
    "plan --top": "leave it out: the best layout of every strategy is shown",
    "check --against env": "leave it out: `dmt launch` refuses variables that would hang a run "
    "or change what it computes",
    "doctor --bandwidth": "`dmt doctor --calibrate` measures the links of a machine; between "
    "machines use NVIDIA's nccl-tests",
    "doctor --hostfile": "`deepspeed --hostfile FILE` asks the machines before it starts",
    "doctor --selftest": "use `dmt doctor --gpu-selftest`; on processors `dmt rehearse RECIPE`",
    "doctor --processes": "leave it out; CUDA_VISIBLE_DEVICES=0,1 measures or tests two GPUs",
    "rehearse --ranks": "leave it out: the first rank of each pipeline stage is run",
    "rehearse --time-limit": "leave it out: a layout has a minute a step, and at least five",
    "doctor --only": "leave it out; `dmt rehearse RECIPE --on gpu --layouts NAMES` runs less",
    "doctor --jobs": "leave it out: the parts of the self-test run one after the other",
    **dict.fromkeys(
        ("doctor --folder", "rehearse --folder"), "use --out FILE: the report is a file"
    ),
    "eval": f"{_EXPORT}, then {_HARNESS} (docs/checkpoints.md)",
    "chat": f"{_EXPORT}, then `transformers serve FOLDER` and, next to it, `transformers chat "
    "FOLDER` (pip install 'transformers[serving]')",
    "compare": "use `dmt report RUN RUN`",
    "report --text": "leave it out: text is the default",
    "tune --dry-run": "use `dmt plan RECIPE --explain`, which lists the best layouts",
    "tune --throughput": "leave it out: `dmt tune RECIPE` measures layouts",
    "tune --transfer": "search narrower models yourself, and carry the rate over",
    "tune --sweep": "write a sweep of W&B whose program is `dmt launch` (docs/tuning.md)",
    "tune --prune": "leave it out: trials that are worse than others end early",
    "tune --no-prune": "train the points yourself with `dmt launch --set KEY=VALUE`",
    "tune --hang-seconds": "use --set launch.hang_timeout_s=SECONDS",
    "tune --parallel": "start the same command several times, each with CUDA_VISIBLE_DEVICES",
    "tune --agent": "let the sweep's program be `dmt launch` (docs/tuning.md)",
    "watch": "`watch -n5 dmt report RUN` while the run trains, or a tracker (`logging`)",
    "checkpoint convert": "keep the checkpoint: runs continue from it in any layout, and `dmt "
    "checkpoint export` writes whole tensors",
    "checkpoint inspect": "`dmt checkpoint list` shows step and layout, manifest.json and "
    "index.json in the step's folder have the rest",
    "checkpoint fits": "start the run: `dmt launch` refuses a checkpoint that does not fit, "
    "and names why, before the first step",
    **{
        f"checkpoint {verb} --json": "leave it out; the exit code is 0, 2 or 3, and "
        "manifest.json in the step's folder has the numbers"
        for verb in ("list", "verify", "export", "import")
    },
    "checkpoint export --push-to-hub": "export, then `hf upload REPO FOLDER`",
    "checkpoint export --private": "export, then `hf upload REPO FOLDER --private`",
    "checkpoint export --shard-size": "leave it out: a file has 5 GB at most; transformers' "
    "save_pretrained(max_shard_size=…) writes smaller ones",
    **{
        f"checkpoint export --{option}": f"leave it out; {_HARNESS} measures an export"
        for option in ("compare-logits", "verify")
    },
    **{
        f"render --to {tool}": "train with `dmt launch`: DMT no longer writes that tool's files"
        for tool in [
            "axolotl",
            "gpt-neox",
            "llama-factory",
            "megatron-bridge",
            "torchtitan",
            "trainer",
        ]
    },
    "render --to megatron-lm": "`dmt plan RECIPE --flags megatron-lm` prints the layout",
    "render --out": "write `dmt render RECIPE > FILE`",
    "render --to skypilot": "copy the template in docs/launchers.md",
    "render --to dstack": "copy the template in docs/launchers.md",
    "convert": "`dmt checkpoint export FOLDER DIR --to megatron` writes for Megatron-LM, `dmt "
    "checkpoint import RECIPE DIR --to FOLDER` writes one with the weights of such a folder",
}
"""What to do instead of a removed command (`data stats`) or option (`launch --option`)."""


def without_unset(stated: Any, prefix: str = "") -> Any:
    """A stated recipe without the removed settings that are null or at what was their default.

    Lists keep their order. What is neither a map nor a list is returned as it is.
    """
    if isinstance(stated, Mapping):
        paths = {key: f"{prefix}.{key}" if prefix else str(key) for key in stated}
        return {
            key: without_unset(value, paths[key])
            for key, value in stated.items()
            if paths[key] not in SETTINGS or not _is_unset(paths[key], value)
        }
    if isinstance(stated, list):
        return [without_unset(one, prefix) for one in stated]
    return stated


def _is_unset(path: str, value: object) -> bool:
    """Whether a value is null or the former default. For a section, whether every value is."""
    default = DEFAULTS.get(path)
    if isinstance(default, Mapping) and isinstance(value, Mapping):
        return all(key in default and _same(default[key], value[key]) for key in value)
    return value is None or _same(default, value)


def _same(default: object, value: object) -> bool:
    """Whether a value equals the default. `true` does not equal 1."""
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    return type(value) in kinds and value == default


def removed_command(arguments: Sequence[str]) -> tuple[str, str] | None:
    """The removed command or option in a command line (without `dmt`), and what to do instead.
    None if there is none."""
    words = (one.replace("=", " ", 1) if one.startswith("-") else one for one in arguments)
    text = f" {' '.join(words)} "
    for name, instead in COMMANDS.items():
        verb, dashes, option = name.partition(" --")
        if text.startswith(f" {verb} ") and (not dashes or f" --{option} " in text):
            return name, instead
    return None
