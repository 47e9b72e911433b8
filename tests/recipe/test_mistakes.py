"""One mistake in a good recipe → exactly one problem: right key, right line, a fix."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit.cli.check import judge


@dataclass(frozen=True)
class Mistake:
    """Replace `old` by `new` in GOOD; expect one problem about `key`."""

    old: str
    new: str
    key: str
    fix: str
    at: str = ""
    """Text of the line that must be blamed; default: the first line of `new`."""


M = Mistake
_ONE_SOURCE = GOOD[GOOD.index("  train:") : GOOD.index("  tokenizer:")]
_REST = GOOD[GOOD.index("engine: auto") :].rstrip()
_WHOLE = _REST.replace("engine: auto", "engine: ddp")
"""With an engine that splits no model."""


def blend(
    first: str,
    second: str,
    third: str = "",
    stages: str = "[]",
    run: str = "steps: 100",
    fraction: str = "0.05",
) -> tuple[str, str]:
    """GOOD from its data to its length, and the same with a list of sources."""
    sources = [
        f"{{kind: text, files: [a.txt], {first}}}",
        f"{{kind: text, files: [b.txt], {second}}}",
        *[third] * bool(third),
    ]
    listed = "".join(f"    - {one}\n" for one in sources)
    rest = "  tokenizer: bytes\ntraining:\n"
    return (
        f"{_ONE_SOURCE}{rest}  steps: 100",
        f"  train:\n{listed}  stages: {stages}\n"
        f"  validation_fraction: {fraction}\n{rest}  {run}",
    )


MISTAKES = {
    # types and ranges
    "quoted number": M(
        "steps: 100", 'steps: "100"', "training.steps", "remove the quotes: 100"
    ),
    "float for an int": M("steps: 100", "steps: 1.5", "training.steps", "whole number, e.g. 2"),
    "whole float for an int": M("steps: 100", "steps: 1e2", "training.steps", "write 100"),
    "underscores": M("steps: 100", "steps: 1_000", "training.steps", "write 1000"),
    "thousands comma": M("steps: 100", 'steps: "1,000"', "training.steps", "write 1000"),
    "suffix": M("steps: 100", "steps: 8k", "training.steps", "write 8000"),
    "text for an int": M("steps: 100", "steps: many", "training.steps", "write an integer"),
    "zero steps": M("steps: 100", "steps: 0", "training.steps", "write 1 or more"),
    "negative": M("seed: 1", "seed: -1", "training.seed", "write 0 or more"),
    "too large": M("seed: 1", "seed: 99999999999999999999", "training.seed", "or less"),
    "bool for an int": M("seed: 1", "seed: true", "training.seed", "write an integer"),
    "null for a required int": M(
        "sequence_length: 64", "sequence_length:", "training.sequence_length", "integer ≥ 2"
    ),
    "list for an int": M(
        "micro_batch_size: 2",
        "micro_batch_size: [2]",
        "training.micro_batch_size",
        "brackets: 2",
    ),
    "map for an int": M(
        "micro_batch_size: 2", "micro_batch_size: {a: 2}", "training.micro_batch_size", "auto"
    ),
    "union out of range": M(
        "micro_batch_size: 2", "micro_batch_size: 0", "training.micro_batch_size", "1 or more"
    ),
    "misspelt auto": M(
        "micro_batch_size: 2",
        "micro_batch_size: atuo",
        "training.micro_batch_size",
        "mean auto",
    ),
    "infinite": M(
        "learning_rate: 3e-4",
        "learning_rate: .inf",
        "optimizer.learning_rate",
        "another number",
    ),
    "overflowing": M(
        "learning_rate: 3e-4",
        "learning_rate: 1e999",
        "optimizer.learning_rate",
        "another number",
    ),
    "not a number": M(
        "weight_decay: 0.1", "weight_decay: .nan", "optimizer.weight_decay", "anoth"
    ),
    "number of 5,000 digits": M(
        "seed: 1", "seed: " + "9" * 5000, "training.seed", "another number"
    ),
    "negative rate": M(
        "learning_rate: 3e-4", "learning_rate: -1", "optimizer.learning_rate", "more than 0"
    ),
    "quoted float": M(
        "weight_decay: 0.1", "weight_decay: '0.1'", "optimizer.weight_decay", "quotes: 0.1"
    ),
    "beta of 1": M("[0.9, 0.95]", "[0.9, 1.0]", "optimizer.betas[1]", "less than 1"),
    "one beta": M("[0.9, 0.95]", "[0.9]", "optimizer.betas", "a list of 2 numbers ≥ 0 and < 1"),
    "three betas": M("[0.9, 0.95]", "[0.9, 0.9, 0.9]", "optimizer.betas", "list of 2 numbers"),
    "scalar for a list": M('["{stdlib}/*.py"]', "'*.py'", "data.train.files", '["*.py"]'),
    "empty list": M('["{stdlib}/*.py"]', "[]", "data.train.files", "a list of texts"),
    "number in a list": M('["{stdlib}/*.py"]', "[a, 3]", "data.train.files[1]", 'quotes: "3"'),
    "yes for a boolean": M(
        "sequence: auto", "sequence: yes", "parallel.sequence", "write true"
    ),
    "off for a boolean": M(
        "sequence: auto", "sequence: off", "parallel.sequence", "write false"
    ),
    "boolean for a word": M(
        "stage: auto",
        "offload_optimizer: false",
        "parallel.zero.offload_optimizer",
        "write none",
    ),
    "boolean for a stage": M("stage: auto", "stage: true", "parallel.zero.stage", "write auto"),
    "stage 4": M("stage: auto", "stage: 4", "parallel.zero.stage", "write one of 0, 1,"),
    "number for a section": M(
        "  zero:\n    stage: auto", "  zero: 2", "parallel.zero", "write {stage: 2}"
    ),
    "true for a section": M(
        "every_steps: 1\n", "every_steps: 1\n  wandb: true\n", "logging.wandb",
        "write {project: dmt}", at="wandb: true",
    ),
    "misspelt word": M("name: cosine", "name: cosin", "schedule.name", "did you mean cosine"),
    "upper case": M("precision: fp32", "precision: FP32", "training.precision", "mean fp32"),
    "name with spaces": M("name: good", "name: my run", "name", "write my-run"),
    "number for a name": M("name: good", "name: 7", "name", 'in quotes: "7"'),
    # keys
    "misspelt key": M("seed: 1", "sede: 1", "training.sede", "did you mean `seed`"),
    "no checkpoint": M(
        "init: random", "init: checkpoint", "model.checkpoint", "add `checkpoint:", at="model:"
    ),
    "an unused checkpoint": M(
        "init: random", "checkpoint: runs/x", "model.checkpoint", "set model.init to checkpoint"
    ),
    "an objective for other data": M(
        "seed: 1", "objective: sft", "data.train.kind", "to pretrain", at="kind: text"
    ),
    "settings of another objective": M(
        "optimizer:", "dpo: {beta: 0.2}\noptimizer:", "dpo", "set training.objective to dpo"
    ),
    "an unknown loss": M(
        "optimizer:", "dpo: {loss: kto}\noptimizer:", "dpo.loss", "sigmoid"
    ),
    "an adapter": M("seed: 1", "peft: {r: 8}", "training.peft", "write `adapter`"),
    "rank of adapters in words of PEFT": M(
        "seed: 1", "lora_r: 8", "training.lora_r", "write `adapter.rank`"
    ),
    "a misspelt projection": M(
        "launch:", "adapter: {rank: 4, alpha: 8, targets: [q_prj]}\nlaunch:",
        "adapter.targets", "did you mean `q_proj`?",
    ),
    "adapters of rank 0": M(
        "launch:", "adapter: {rank: 0, alpha: 8}\nlaunch:", "adapter.rank", "1 or more"
    ),
    "adapters and frozen weights": M(
        "init: random", "freeze: [model.norm.*]", "model.freeze", "remove one of model.freeze"
    ),
    "a group without parameters": M(
        "weight_decay: 0.1",
        "groups:\n    - parameters: [model.*]\n      lr_mult: 0.5\n    - parameters: [modle.*]",
        "optimizer.groups[1].parameters",
        "lists the names",
        at="- parameters: [modle.*]",
    ),
    "multiplier of a group": M(
        "weight_decay: 0.1",
        "groups:\n    - parameters: [model.*]\n      lr_mult: 0",
        "optimizer.groups[0].lr_mult",
        "write more than 0",
        at="lr_mult: 0",
    ),
    "key of a group": M(
        "weight_decay: 0.1",
        "groups:\n    - parameters: [model.*]\n      weight_mult: 0",
        "optimizer.groups[0].weight_mult",
        "did you mean",
        at="weight_mult: 0",
    ),
    "missing key of a group": M(
        "weight_decay: 0.1",
        "groups:\n    - lr_mult: 0.5",
        "optimizer.groups[0].parameters",
        "add `parameters:` under `optimizer.groups[0]`",
        at="- lr_mult: 0.5",
    ),
    "groups as a map": M(
        "weight_decay: 0.1",
        "groups: {model.embed_tokens.*: 0.5}",
        "optimizer.groups",
        "write a list of maps of parameters, lr_mult, wd_mult",
    ),
    "another tool's groups": M(
        "weight_decay: 0.1", "decoupled_lr: 0.5", "optimizer.decoupled_lr", "optimizer.groups"
    ),
    "another tool's layer decay": M(
        "weight_decay: 0.1", "layerwise_lr_decay: 0.9", "optimizer.layerwise_lr_decay",
        "optimizer.groups",
    ),
    "settings of Muon with AdamW": M(
        "  name: adamw", "  name: adamw\n  muon: {momentum: 0.9}",
        "optimizer.muon", "set optimizer.name to muon", at="muon: {momentum: 0.9}",
    ),
    "Muon with adapters": M(
        "optimizer:\n  name: adamw", "adapter: {rank: 4, alpha: 8}\noptimizer:\n  name: muon",
        "optimizer.name", "set optimizer.name to adamw", at="name: muon",
    ),
    "nothing similar": M("seed: 1", "quantize: 4", "training.quantize", "docs/recipe.md lists"),
    "misspelt section": M("launch:", "lanch:", "lanch", "did you mean `launch`"),
    "misspelt required key": M(
        "global_batch_size: 8",
        "global_batch_sise: 8",
        "training.global_batch_sise",
        "global_batch",
    ),
    "key at the top": M(
        "name: good",
        "name: good\nlearning_rate: 1",
        "learning_rate",
        "belongs under `optimizer`",
        at="learning_rate: 1",
    ),
    "key of another section": M(
        "seed: 1", "warmup_steps: 3", "training.warmup_steps", "`schedule`"
    ),
    "nonsense key": M("seed: 1", "qqqqqq: 1", "training.qqqqqq", "docs/recipe.md"),
    "missing key": M(
        "  sequence_length: 64\n",
        "",
        "training.sequence_length",
        "under `training`",
        at="training:",
    ),
    "missing section": M(
        "optimizer:\n  name: adamw\n  learning_rate: 3e-4\n  betas: [0.9, 0.95]\n"
        "  weight_decay: 0.1\n",
        "",
        "optimizer",
        "at the top",
        at="name: good",
    ),
    "missing kind": M(
        "    kind: text\n", "", "data.train.kind", "add `kind: text`", at="  train:"
    ),
    "misspelt kind": M("kind: text", "kind: txt", "data.train.kind", "did you mean text"),
    "key of another kind": M(
        "kind: text",
        "kind: text\n    prefix: a",
        "data.train.prefix",
        "set kind to megatron",
        at="prefix: a",
    ),
    "one of two betas": M("betas: [0.9, 0.95]", "betas: 0.8", "optimizer.betas", "[0.8, 0.95]"),
    "offload as a switch": M(
        "stage: auto",
        "offload_optimizer: true",
        "parallel.zero.offload_optimizer",
        "write cpu",
    ),
    "PEFT's rank": M(
        "\ndata:", "\nadapter: {r: 8, alpha: 16}\ndata:", "adapter.r", "adapter.rank"
    ),
    "engine with a stage": M(
        "engine: auto", "engine: zero3", "parallel.engine", "deepspeed, and `zero: {stage: 3}`"
    ),
    "GPU with other memory": M("gpu: cpu", "gpu: A100-64GB", "cluster.gpu", "`a100-"),
    "a folder of texts": M(
        'files: ["{stdlib}/*.py"]', "files: [../..]", "data.train.files", "**/*.txt"
    ),
    "key twice": M(
        "seed: 1", "seed: 1\n  seed: 2", "training.seed", "remove one", at="seed: 2"
    ),
    "number as a key": M("seed: 1", "3: 1", "training", 'quotes: "3"'),
    "merge key": M("seed: 1", "<<: {seed: 1}", "training.<<", "extends"),
    # YAML
    "tab": M("  seed: 1", "\tseed: 1", "(file)", "spaces, not tabs"),
    "colon in a value": M("name: good", "name: a: b", "(file)", "quotes"),
    "open bracket": M(
        "betas: [0.9, 0.95]", "betas: [0.9, 0.95", "(file)", "fix the YAML", at="weight_decay"
    ),
    "python tag": M(
        "seed: 1", "seed: !!python/object/apply:os.system [id]", "training.seed", "tag"
    ),
    "own tag": M("seed: 1", "seed: !env SEED", "training.seed", "remove the tag"),
    "unknown alias": M("seed: 1", "seed: *other", "(file)", "fix the YAML"),
    "GPU": M("gpu: cpu", "gpu: p100", "cluster.gpu", "describe yours by the closest"),
    "GPU like none": M("gpu: cpu", "gpu: {memory_gib: 3}", "cluster.gpu.like", "add `like:`"),
    "GPU like an unknown one": M(
        "gpu: cpu", "gpu: {like: rtx40990}", "cluster.gpu.like", "did you mean `rtx4090`?"
    ),
    "GPU like a processor": M("gpu: cpu", "gpu: {like: cpu}", "cluster.gpu.like", "gpu: cpu"),
    "GPU of unknown precision": M(
        "gpu: cpu", "gpu: {like: a10g, tflops: {bf61: 1}}", "cluster.gpu.tflops.bf61", "`bf16`?"
    ),
    "GPU without memory": M(
        "gpu: cpu", "gpu: {like: a10g, memory_gib: 0}", "cluster.gpu.memory_gib", "more than 0"
    ),
    "W&B project with a control character": M(
        "every_steps: 1\n",
        'every_steps: 1\n  wandb: {project: "a\\eb"}\n',
        "logging.wandb.project",
        "write 1 to 128 characters, without",
        at="wandb:",
    ),
    "W&B project with a slash": M(
        "every_steps: 1\n",
        "every_steps: 1\n  wandb: {project: team/dmt}\n",
        "logging.wandb.project",
        "write 1 to 128 characters, without",
        at="wandb:",
    ),
    "W&B entity": M(
        "every_steps: 1\n",
        'every_steps: 1\n  wandb: {entity: "a\\u0085b"}\n',
        "logging.wandb.entity",
        "or null",
        at="wandb:",
    ),
    "W&B tag": M(
        "every_steps: 1\n",
        "every_steps: 1\n  wandb: {tags: [ok, " + "x" * 65 + "]}\n",
        "logging.wandb.tags[1]",
        "write 1 to 64 characters",
        at="wandb:",
    ),
    "NUL character": M("tokenizer: bytes", 'tokenizer: "a\\0b"', "data.tokenizer", "character"),
    "control character": M("tokenizer: bytes", "tokenizer: a\x07b", "(file)", "fix the YAML"),
    "second document": M(
        "seed: 1", "seed: 1\n---\nname: b", "(file)", "one document", at="---"
    ),
    # other tools' names
    "accumulation": M(
        "seed: 1",
        "gradient_accumulation_steps: 4",
        "training.gradient_accumulation_steps",
        "derived: global_batch_size / (micro_batch_size · dp)",
    ),
    "Megatron's tensor": M(
        "engine: auto",
        "tensor_model_parallel_size: 2",
        "parallel.tensor_model_parallel_size",
        "`parallel.tensor`",
    ),
    "zero_stage": M(
        "engine: auto", "zero_stage: 2", "parallel.zero_stage", "parallel.zero.stage"
    ),
    "lr": M("learning_rate: 3e-4", "lr: 3e-4", "optimizer.lr", "`optimizer.learning_rate`"),
    "max_steps": M("steps: 100", "max_steps: 100", "training.max_steps", "`training.steps`"),
    "HF batch": M(
        "micro_batch_size: 2",
        "per_device_train_batch_size: 2",
        "training.per_device_train_batch_size",
        "`training.micro_batch_size`",
    ),
    "HF block": M(
        "name: good", "name: good\nbf16: true", "bf16", "training.precision", at="bf16: true"
    ),
    "DeepSpeed block": M(
        "name: good",
        "name: good\nzero_optimization: {stage: 2}",
        "zero_optimization",
        "`parallel.zero`",
        at="zero_optimization",
    ),
    "foreign precision": M(
        "precision: fp32", "precision: bfloat16", "training.precision", "bf16"
    ),
    "foreign optimizer": M("name: adamw", "name: adamw_torch", "optimizer.name", "write adamw"),
    # secrets
    "api key": M(
        "every_steps: 1\n",
        "every_steps: 1\n  wandb: {api_key: hunter22}\n",
        "logging.wandb.api_key",
        "WANDB_API_KEY",
        at="wandb:",
    ),
    "hub token": M(
        "tokenizer: bytes", "tokenizer: hf_" + "aB3" * 12, "data.tokenizer", "HF_TOKEN"
    ),
    "login in a URL": M(
        '["{stdlib}/*.py"]', '["https://me:pw@host/x"]', "data.train.files[0]", "environment"
    ),
    # settings that disagree
    "no length": M("  steps: 100\n", "", "training", "add e.g. `steps: 1000`", at="training:"),
    "misspelt objective": M(
        "seed: 1", "objective: pretran", "training.objective", "did you mean pretrain?"
    ),
    "two lengths": M(
        "steps: 100", "steps: 100\n  epochs: 2", "training.epochs", "remove one", at="epochs: 2"
    ),
    "min above peak": M(
        "min_learning_rate: 3e-5",
        "min_learning_rate: 1e-3",
        "schedule.min_learning_rate",
        "3e-05",
    ),
    "misspelt key of another kind": M(
        "kind: text", "kind: text\n    colums: {}", "data.train.colums",
        "did you mean `columns`, with kind chat or preference?",
        at="colums: {}",
    ),
    "two warm-ups": M(
        "  warmup_steps: 10", "  warmup_ratio: 0.1\n  warmup_steps: 10",
        "schedule.warmup_ratio", "remove one",
    ),
    "wsd without decay": M(
        "name: cosine", "name: wsd", "schedule.decay_steps", "decay_steps:", at="schedule:"
    ),
    "decay without wsd": M(
        "name: cosine",
        "name: cosine\n  decay_steps: 5",
        "schedule.decay_steps",
        "wsd",
        at="decay_steps: 5",
    ),
    "shape of a decay without wsd": M(
        "name: cosine", "name: cosine\n  decay: 1-sqrt", "schedule.decay", "wsd",
        at="decay: 1-sqrt",
    ),
    "early stopping without validations": M(
        "evaluation:\n  every_steps: 50", "evaluation:\n  early_stopping: {patience: 3}",
        "evaluation.early_stopping", "set evaluation.every_steps", at="early_stopping",
    ),
    "ramp that no layout can spread": M(
        "  micro_batch_size: 2",
        "  batch_ramp: {start: 4, increment: 3, steps: 10}\n  micro_batch_size: 2",
        "training.batch_ramp.increment", "increment to 2", at="batch_ramp:",
    ),
    "ramp without a length": M(
        "  micro_batch_size: 2",
        "  batch_ramp: {start: 4, increment: 4}\n  micro_batch_size: 2",
        "training.batch_ramp", "`steps: N`", at="batch_ramp:",
    ),
    "ramp from the whole batch": M(
        "  micro_batch_size: 2",
        "  batch_ramp: {start: 8, increment: 4, steps: 10}\n  micro_batch_size: 2",
        "training.batch_ramp.start", "set it to less", at="batch_ramp:",
    ),
    "no checkpoint of a step that is validated": M(
        "checkpoint:\n  every_steps: 50", "checkpoint:\n  keep_best: 1\n  every_steps: 30",
        "checkpoint.every_steps", "to 50", at="every_steps: 30",
    ),
    "settings of another schedule": M(
        "name: cosine", "name: cosine\n  plateau: {patience: 2}", "schedule.plateau",
        "name to plateau", at="plateau:",
    ),
    "decay too long": M(
        "name: cosine",
        "name: wsd\n  decay_steps: 95",
        "schedule.decay_steps",
        "to 90",
        at="decay_steps: 95",
    ),
    "a part of a config next to a hub id": M(
        "    model_type: llama\n", "", "model.config", "edit its config.json", at="config:"
    ),
    "pretrained without hub": M(
        "init: random", "init: pretrained", "model.hub", "hub:", at="model:"
    ),
    "bad model config": M(
        "hidden_size: 64",
        "hidden_size: 66",
        "model.config.num_attention_heads",
        "use 3",
        at="num_attention_heads: 4",
    ),
    "unknown model config key": M(
        "hidden_size: 64", "hidden_sise: 64", "model.config.hidden_sise", "hidden_size"
    ),
    "sequence too long": M(
        "sequence_length: 64", "sequence_length: 256", "training.sequence_length", "to 128"
    ),
    "isolated documents scaled by their length": M(
        "    max_position_embeddings: 128\n",
        "    max_position_embeddings: 32\n    rope_scaling: {type: dynamic, factor: 4.0}\n",
        "training.sequence_length",
        "set it to 32",
        at="sequence_length: 64",
    ),
    "nvme without path": M(
        "stage: auto",
        "stage: 3\n    offload_optimizer: nvme",
        "parallel.zero.nvme_path",
        "nvme_path:",
        at="  zero:",
    ),
    "path without nvme": M(
        "stage: auto",
        "offload_optimizer: none\n    offload_parameters: cpu\n    nvme_path: /x",
        "parallel.zero.nvme_path",
        "remove it",
        at="nvme_path",
    ),
    "offloaded parameters below 3": M(
        "stage: auto",
        "stage: 2\n    offload_parameters: cpu",
        "parallel.zero.offload_parameters",
        "to auto",
        at="offload_parameters",
    ),
    "offload in stage 0": M(
        "stage: auto",
        "stage: 0\n    offload_optimizer: cpu",
        "parallel.zero.offload_optimizer",
        "to auto",
        at="offload_optimizer",
    ),
    "ZeRO with ddp": M("stage: auto", "stage: 2", "parallel.zero.stage", "to auto"),
    "batch not divisible": M(
        "global_batch_size: 8",
        "global_batch_size: 9",
        "training.global_batch_size",
        "to 8 or 10",
    ),
    "batch below ranks": M(
        _REST,
        _WHOLE.replace("gpus_per_node: 2", "gpus_per_node: 16"),
        "training.global_batch_size",
        "to 16",
        at="global_batch_size: 8",
    ),
    "context beyond the ranks": M("engine: auto", "context: 3", "parallel.context", "to auto"),
    "misspelt context": M("engine: auto", "contex: 2", "parallel.contex", "`context`"),
    "Accelerate's context": M(
        "engine: auto", "cp_size: 2", "parallel.cp_size", "`parallel.context`"
    ),
    "length that context cannot split": M(
        "sequence_length: 64", "sequence_length: 66", "parallel.context", "to auto", "context"
    ),
    "dropout that context splits": M(
        *("model_type: llama", "model_type: llama\n    attention_dropout: 0.1"),
        *("parallel.context", "to auto", "context"),
    ),
    "Megatron's exchange": M(
        "launch:", "kernels: {context: p2p}\nlaunch:", "kernels.context", "write all_gather"
    ),
    "exchange without ranks": M(
        "launch:", "kernels: {context: ulysses}\nlaunch:", "kernels.context", "context to 2"
    ),
    "Megatron's context": M(
        "engine: auto",
        "context_parallel_size: 2",
        "parallel.context_parallel_size",
        "parallel.context",
    ),
    "fp16 on CPU": M("precision: fp32", "precision: fp16", "training.precision", "to bf16"),
    "NVMe below stage 3": M(
        "stage: auto",
        "stage: 2\n    offload_optimizer: nvme\n    nvme_path: /x",
        "parallel.zero.offload_optimizer",
        "to auto",
        at="offload_optimizer",
    ),
    "selective recompute": M(
        "engine: auto",
        "model: hf\n  recompute: selective",
        "parallel.recompute",
        "to auto",
        at="recompute: selective",
    ),
    "unknown gpu": M("gpu: cpu", "gpu: h100-80", "cluster.gpu", "h100-80gb"),
    "evaluation without data": M(
        "  validation_fraction: 0.05\n",
        "",
        "evaluation.every_steps",
        "validation_fraction",
        at="  every_steps: 50",
    ),
    "packing of text": M(
        "tokenizer: bytes", "packing: greedy", "data.packing", "remove it", at="packing"
    ),
    "packing as TRL has it": M(
        "tokenizer: bytes", "packing: true", "data.packing", "greedy for chats", at="packing"
    ),
    "reinforcement learning": M(
        "  steps: 100", "  steps: 100\n  objective: grpo", "training.objective",
        "on given answers only: write dpo or orpo", at="objective",
    ),
    "an optimizer that DeepSpeed has removed": M(
        "adamw", "OneBitAdam", "optimizer.name", "parallel.outer",
    ),
    "noise of TRL": M(
        "  steps: 100", "  steps: 100\n  neftune: 5", "training.neftune", "remove it",
        at="neftune",
    ),
    "early stopping": M(
        "  steps: 100", "  steps: 100\n  early_stopping: 5", "training.early_stopping",
        "belongs under `evaluation`", at="early_stopping",
    ),
    "generation": M(
        "  steps: 100", "  steps: 100\n  predict_with_generate: true",
        "training.predict_with_generate", "docs/checkpoints.md", at="predict",
    ),
    "the best model": M(
        "  steps: 100", "  steps: 100\n  load_best_model_at_end: true",
        "training.load_best_model_at_end", "checkpoint.keep_best", at="load_best",
    ),
    "completions": M(
        "  validation_fraction", "  completion_only: true\n  validation_fraction",
        "data.completion_only", "data.train.loss_on", at="completion_only",
    ),
    "chat template for text": M(
        "tokenizer: bytes", "chat_template: chatml", "data.chat_template", "kind: chat"
    ),
    "preferences without a comparison": M(
        '    kind: text\n    files: ["{stdlib}/*.py"]',
        "    kind: preference\n    path: org/pairs",
        "data.train.kind",
        "dpo or orpo",
        at="kind: preference",
    ),
    "text to validate chats": M(
        '    kind: text\n    files: ["{stdlib}/*.py"]\n  validation_fraction: 0.05',
        "    kind: chat\n    path: org/chats\n"
        '  validation: {kind: text, files: ["{stdlib}/this.py"]}',
        "data.validation.kind",
        "validation_fraction",
        at="  validation:",
    ),
    "documents that are dropped": M(
        '    kind: text\n    files: ["{stdlib}/*.py"]',
        "    kind: hf\n    path: org/texts\n    malformed: drop",
        "data.train.malformed",
        "correct or remove",
        at="malformed: drop",
    ),
    "weight of one source": M(
        "kind: text",
        "kind: text\n    weight: 1",
        "data.train.weight",
        "write data.train as",
        at="weight",
    ),
    "stages of one source": M(
        "  tokenizer: bytes",
        "  stages: [{from_step: 5, weights: {a: 1}}]",
        "data.stages[0].weights",
        "list of sources",
    ),
    "a stage that changes nothing": M(
        "  tokenizer: bytes",
        "  stages: [{from_step: 5}]",
        "data.stages[0].weights",
        "add",
        at="stages:",
    ),
    "source without a weight": M(
        *blend("weight: 1", "label: b"), "data.train[1].weight", "add e.g. `weight: 1`", at=":"
    ),
    "weights and epochs": M(
        *blend("weight: 1", "epochs: 2"), "data.train[1].epochs", "write weight", at="epochs: 2"
    ),
    "weights without a sum": M(
        *blend("weight: 0", "weight: 0"), "data.train", "raise a weight", at="train:"
    ),
    "two sources of one name": M(
        *blend("weight: 1, label: a", "weight: 1, label: a"),
        "data.train[1].label",
        "`label`",
        at="[b.txt]",
    ),
    "sources of two kinds": M(
        *blend("weight: 1", "weight: 1", "{kind: chat, path: org/chats, weight: 1}"),
        "data.train[2].kind",
        "objective to sft",
        at="org/chats",
    ),
    "conversations and preferences": M(
        *blend("weight: 1", "weight: 1", "{kind: preference, path: org/pairs, weight: 1}"),
        "data.train[2].kind",
        "one after the other",
        at="org/pairs",
    ),
    "packed conversations and documents that are not isolated": M(
        *blend("weight: 1", "weight: 1", "{kind: chat, path: org/chats, weight: 1}"),
        "data.isolate_documents",
        "set it to true",
        at="data:",
    ),
    "documents alone for conversations": M(
        "seed: 1", "objective: sft\n  seed: 1", "data.train.kind", "pretrain", at="kind: text"
    ),
    "misspelt key of a listed source": M(
        *blend("weight: 1", "wieght: 1"), "data.train[1].wieght", "`weight`", at="wieght"
    ),
    "wrong kind of a listed source": M(
        *blend("weight: 1", "weight: 1", "{kind: txt, weight: 1}"),
        "data.train[2].kind",
        "did you mean text",
        at="txt",
    ),
    "wrong value in a listed source": M(
        *blend("weight: 1", "weight: -1"), "data.train[1].weight", "write 0 or more", at="-1"
    ),
    "an epoch of weights": M(
        *blend("weight: 1", "weight: 1", run="epochs: 2"),
        "training.epochs",
        "training.steps",
        at="epochs: 2",
    ),
    "a stage that forgets a source": M(
        *blend("weight: 1", "weight: 1", stages="[{from_step: 5, weights: {a.txt: 1}}]"),
        "data.stages[0].weights",
        "name every source once",
        at="stages:",
    ),
    "stages out of order": M(
        *blend(
            "weight: 1",
            "weight: 1",
            stages="[{from_step: 5, weights: {a.txt: 1, b.txt: 2}}, "
            "{from_step: 5, weights: {a.txt: 1, b.txt: 1}}]",
        ),
        "data.stages[1]",
        "in order",
        at="stages:",
    ),
    "a stage that begins nowhere": M(
        *blend("weight: 1", "weight: 1", stages="[{weights: {a.txt: 1, b.txt: 2}}]"),
        "data.stages[0]",
        "from_step",
        at="stages:",
    ),
    "stages of epochs": M(
        *blend(
            "epochs: 1",
            "epochs: 1",
            stages="[{from_step: 5, weights: {a.txt: 1, b.txt: 2}}]",
        ),
        "data.stages[0].weights",
        "weight",
        at="stages:",
    ),
    "misspelt column": M(
        '    kind: text\n    files: ["{stdlib}/*.py"]',
        "    kind: chat\n    path: org/chats\n    columns: {mesages: x}",
        "data.train.columns.mesages",
        "did you mean `messages`?",
        at="columns",
    ),
    "two validation sources": M(
        "  tokenizer: bytes",
        "  validation: {kind: text, files: [a]}",
        "data.validation_fraction",
        "remove one",
        at="validation_fraction",
    ),
    "virtual without stages": M(
        "engine: auto",
        "pipeline: 1\n  virtual_pipeline: 2",
        "parallel.virtual_pipeline",
        "auto",
        at="virtual_pipeline",
    ),
    "sequence without tensor": M(
        "sequence: auto", "sequence: true\n  tensor: 1", "parallel.sequence", "auto"
    ),
    "pipeline with ZeRO 3": M(
        "stage: auto", "stage: 3\n  pipeline: 2", "parallel.pipeline", "to auto",
        at="pipeline: 2",
    ),
    "tensor with fsdp": M(
        "engine: auto", "engine: fsdp\n  tensor: 2", "parallel.tensor", "to auto",
        at="tensor: 2",
    ),
    "engine and model": M(
        "engine: auto",
        "engine: ddp\n  model: megatron",
        "parallel.model",
        "to auto",
        at="model: megatron",
    ),
    "megatron with ZeRO 2": M("stage: auto", "stage: 2", "parallel.zero.stage", "to auto"),
    "megatron with a DeepSpeed file": M(
        "stage: auto", "config: zero1", "parallel.zero.config", "remove it"
    ),
    "experts of a dense model": M("engine: auto", "expert: 2", "parallel.expert", "to auto"),
    "MLP that tensor cannot split": M(
        "intermediate_size: 128",
        "intermediate_size: 129",
        "parallel.tensor",
        "to auto",
        at="tensor: 2",
    ),
    "sequence that tensor cannot split": M(
        "sequence_length: 64",
        "sequence_length: 63",
        "parallel.sequence",
        "to auto",
        at="sequence: true",
    ),
    "more stages than layers": M(
        "num_hidden_layers: 2", "num_hidden_layers: 1", "parallel.pipeline", "to auto",
        at="pipeline: 2",
    ),
    "more chunks than layers": M(
        "engine: auto",
        "pipeline: 2\n  virtual_pipeline: 2",
        "parallel.virtual_pipeline",
        "to auto",
        at="virtual_pipeline",
    ),
    "a model that megatron lacks": M(
        "model_type: llama", "model_type: llama\n    hidden_act: relu", "model.config",
        "model to hf", at="config:",
    ),
    "the router's loss": M(
        "model_type: llama",
        "model_type: mixtral\n    output_router_logits: true",
        "model.config.output_router_logits",
        "set model.balance: {kind: sequence_loss",
        at="output_router_logits",
    ),
    "balance without experts": M(
        "model:\n", "model:\n  balance: {z_loss: 0.001}\n", "model.balance", "remove",
        at="balance",
    ),
    "a bias that an export would lack": M(
        "model:\n",
        "model:\n  balance: {kind: bias, bias_update: 0.001}\n",
        "model.balance.kind",
        "to {kind: sequence_loss, coefficient: 0.001}",
        at="balance",
    ),
    "a bias that does not move": M(
        "model:\n",
        "model:\n  balance: {bias_update: 0.001}\n",
        "model.balance.bias_update",
        "kind to bias",
        at="balance",
    ),
    "balance without a coefficient": M(
        "model:\n",
        "model:\n  balance: {kind: sequence_loss}\n",
        "model.balance.coefficient",
        "to 0.001",
        at="balance",
    ),
    "elastic with a launcher of one machine": M(
        "launcher: local",
        "launcher: kubernetes\n  max_restarts: 1\n  elastic: {min_nodes: 1, max_nodes: 2}",
        "launch.elastic",
        "launch.launcher to local, slurm or ray",
        at="elastic",
    ),
    "elastic without restarts": M(
        "launcher: local",
        "launcher: local\n  max_restarts: 0\n  elastic: {min_nodes: 1, max_nodes: 2}",
        "launch.max_restarts",
        "set it to 3",
        at="max_restarts",
    ),
    "more machines than an elastic run may have": M(
        "launcher: local",
        "launcher: local\n  max_restarts: 1\n  elastic: {min_nodes: 2, max_nodes: 3}",
        "cluster.nodes",
        "number at the start",
        at="nodes",
    ),
    "elastic with a number that has no layout": M(
        _REST,
        _WHOLE
        + "\n  max_restarts: 1\n  elastic: {min_nodes: 1, max_nodes: 3}",
        "launch.elastic",
        "with 3: set training.global_batch_size to",
        at="elastic",
    ),
    "containers of a pod as a map": M(
        "launcher: local",
        "launcher: local\n  kubernetes:\n    pod:\n      containers: {name: a}",
        "launch.kubernetes.pod.containers",
        "write `containers: [{…}]`",
        at="containers:",
    ),
    "no warm-up next to one": M(
        "  warmup_steps: 10", "  warmup_ratio: 0\n  warmup_steps: 10",
        "schedule.warmup_ratio", "or `schedule.warmup_steps: 0` where it comes from",
    ),
    "restarts that may not continue": M(
        "checkpoint:\n",
        "checkpoint:\n  resume: never\n",
        "checkpoint.resume",
        "to auto",
        at="resume",
    ),
    "fsdp with half an offload": M(
        "stage: auto",
        "stage: 3\n    offload_optimizer: cpu\n    offload_parameters: none",
        "parallel.zero.offload_optimizer",
        "to auto",
        at="offload_optimizer",
    ),
}  # fmt: skip
EXTRA = {
    **dict.fromkeys(
        ("length that context cannot split", "dropout that context splits"),
        ("engine: auto", "context: 2"),
    ),
    "isolated documents scaled by their length": (
        "data:\n",
        "data:\n  isolate_documents: true\n",
    ),
    "text to validate chats": ("seed: 1", "objective: sft\n  seed: 1"),
    "packed conversations and documents that are not isolated": (
        "training:\n",
        "  packing: greedy\ntraining:\n  objective: sft\n",
    ),
    "a part of a config next to a hub id": ("  init: random\n", "  init: random\n  hub: a/b\n"),
    "ZeRO with ddp": ("engine: auto", "engine: ddp"),
    "fsdp with half an offload": ("engine: auto", "engine: fsdp"),
    "megatron with ZeRO 2": ("engine: auto", "engine: megatron"),
    "megatron with a DeepSpeed file": ("engine: auto", "engine: megatron"),
    "MLP that tensor cannot split": ("engine: auto", "tensor: 2"),
    "sequence that tensor cannot split": ("sequence: auto", "sequence: true\n  tensor: 2"),
    "more stages than layers": ("engine: auto", "pipeline: 2"),
    "a model that megatron lacks": ("engine: auto", "model: megatron"),
    "adapters and frozen weights": ("launch:", "adapter: {rank: 4, alpha: 8}\nlaunch:"),
    "balance without a coefficient": ("model_type: llama", "model_type: mixtral"),
    "a bias that an export would lack": ("model_type: llama", "model_type: mixtral"),
    "a bias that does not move": ("model_type: llama", "model_type: mixtral"),
    "restarts that may not continue": (
        "launcher: local",
        "launcher: local\n  max_restarts: 2",
    ),
}
"""A second replacement that a mistake needs to be one."""


def problems_of(path: Path, dmt: Dmt, *options: str) -> list[dict]:
    """Problems from `dmt check --json`, which must exit with 2 and show no traceback."""
    captured = dmt("check", "--json", path, *options, code=2)
    assert "Traceback" not in captured.out + captured.err
    (recipe,) = json.loads(captured.out)["recipes"]
    assert recipe["file"] == str(path)
    assert not recipe["ok"]
    return list(recipe["problems"])


def test_good_recipe_is_good(tmp_path: Path, dmt: Dmt) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    captured = dmt("check", path)
    assert captured.out.startswith("✓ good  ")
    assert captured.err == ""


def test_many_kinds() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_one_clear_problem(
    mistake: Mistake, request: pytest.FixtureRequest, tmp_path: Path, dmt: Dmt
) -> None:
    assert GOOD.count(mistake.old) >= 1
    text = GOOD.replace(mistake.old, mistake.new, 1)
    case = request.node.callspec.id
    if case in EXTRA:
        text = text.replace(*EXTRA[case], 1)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    found = [one for one in problems_of(path, dmt) if not _absent(one, mistake.key)]
    assert len(found) == 1, found
    (problem,) = found
    assert problem["key"] == mistake.key
    assert mistake.fix in problem["fix"]
    assert problem["file"] == str(path)
    at = mistake.at or mistake.new.splitlines()[0].strip()
    assert at in text.splitlines()[problem["line"] - 1], problem
    assert problem["found"]
    assert problem["allowed"]


def _absent(problem: dict[str, str], key: str) -> bool:
    """Whether it is about a source that the case names only as an example."""
    place = re.fullmatch(
        r"data\.(train|validation)(\[\d\])?\.(files|path|prefix)", problem["key"]
    )
    return place is not None and problem["key"] != key


TEN_OF = {
    "name": "a/b", "model.config.hidden_size": "x", "model.config.num_attention_heads": 4.5,
    "model.config.hiden_size": 64, "model.init": "scratch", "model.freeze": "lm_head",
    "model.hub": 7, "data.train.kind": "txt", "data.train.files": ["none/*.md"],
    "data.train.exclude": 3, "data.train.path": "x.jsonl", "data.validation_fraction": 1.5,
    "data.tokenizer": "./none", "data.packing": "greedy", "data.isolate_documents": "yes",
    "data.chat_template": "chatml", "data.cache": [1], "training.steps": "2k",
    "training.tokens": 1e6, "training.sequence_length": 1024, "training.global_batch_size": 7,
    "training.micro_batch_size": 0, "training.precision": "fp16", "training.seed": -1,
    "training.objective": "grpo", "training.lr": 1e-4, "optimizer.name": "adamv",
    "optimizer.learning_rate": "3e-4x", "optimizer.betas": 0.9, "optimizer.weight_decay": -1,
    "optimizer.muon": {}, "optimizer.momentum": 0.9, "schedule.name": "cosinus",
    "schedule.warmup_steps": 500, "schedule.decay_steps": 10, "dpo": {"beta": 0.1},
    "schedule.min_learning_rate": 1.0, "evaluation.every_steps": 0, "evaluation.batchs": 3,
    "parallel.tensor": 3, "parallel.pipeline": 64, "parallel.engine": "zero3",
    "parallel.zero.stage": 4, "parallel.zero.nvme_path": "/tmp", "parallel.sequence": 1,
    "parallel.zero.config": "none.json", "parallel.replicate": 2, "cluster.gpu": "A100",
    "cluster.nodes": 0, "checkpoint.every_steps": "x", "checkpoint.resume": "never",
    "launch.max_restarts": -2, "logging.wandb": {"projekt": "x"}, "logging.every": 5,
    "launch.launcher": "slrum", "adapter": {"rank": 0, "alpha": 16}, "orpo": {"beta": 0},
    "kernels.loss": "chunk", "kernels.fp8": "delayed", "guard.spike_factor": 0.5,
    "extra": {"a": 1},
}  # fmt: skip
"""A wrong value by its setting; some are wrong only together with GOOD or with each other."""


@pytest.mark.parametrize("seed", range(2))
def test_ten_mistakes_take_four_passes(seed: int, tmp_path: Path) -> None:
    """What is reported is put right, as a user would: settings, then rules (two of which may
    hide each other), then the plan and local files; a fifth pass finds nothing."""
    made = random.Random(seed).sample(sorted(TEN_OF), 10)
    path = tmp_path / "recipe.yaml"
    for number in range(5):
        recipe = YAML(typ="safe", pure=True).load(GOOD)
        for key in made:
            *sections, name = key.split(".")
            inside = recipe
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[name] = TEN_OF[key]
        path.write_text(json.dumps(recipe))
        problems = judge(path).problems
        assert number < 4 or not problems
        wrong = [one for one in problems if not any(_about(key, one.key) for key in made)]
        assert not wrong, made
        made = [key for key in made if not any(_about(key, one.key) for one in problems)]


def _about(key: str, found: str) -> bool:
    return f"{key}.".startswith(f"{found}.") or f"{found}.".startswith((f"{key}.", f"{key}["))
