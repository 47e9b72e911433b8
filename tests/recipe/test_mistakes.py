"""One mistake in a good recipe → exactly one problem: right key, right line, a fix."""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit.cli.check import judge


class Mistake(NamedTuple):
    """A wrong statement in GOOD: exactly one problem, which names the key and its line."""

    statement: str
    """`KEY: VALUE` in place of what GOOD states, or added to it; `-KEY`: GOOD without it."""
    fix: str
    key: str = ""
    """The problem's key; default: the statement's."""
    given: tuple[str, ...] = ()
    """Other statements, which are good by themselves."""

    def spoil(self) -> tuple[str, str, int]:
        """The text of the recipe, the key and its line."""
        text, key = stated(self.statement, *self.given), self.key or key_of(self.statement)
        return text, key, line_of(text.splitlines(), key)[0] + 1


class Edit(NamedTuple):
    """A mistake in the text itself, or below a list: replace `old` by `new` in GOOD."""

    old: str
    new: str
    key: str
    fix: str
    at: str = ""
    """Text of the line that must be blamed; default: the first line of `new`."""

    def spoil(self) -> tuple[str, str, int]:
        """See `Mistake.spoil`; the first line with the text `at` is blamed."""
        assert self.old in GOOD
        text = GOOD.replace(self.old, self.new, 1)
        at = self.at or self.new.splitlines()[0].strip()
        return text, self.key, text.count("\n", 0, text.index(at)) + 1


def key_of(statement: str) -> str:
    return statement.removeprefix("-").partition(": ")[0]


def stated(*statements: str) -> str:
    """GOOD with these statements."""
    lines = GOOD.splitlines()
    for statement in statements:
        key = key_of(statement)
        *sections, name = key.split(".")
        number, is_there = line_of(lines, key)
        if is_there:
            del lines[number]
            while number < len(lines) and lines[number].startswith("  " * len(sections) + " "):
                del lines[number]
        if not statement.startswith("-"):
            line = "  " * len(sections) + f"{name}: {statement.removeprefix(f'{key}: ')}"
            lines.insert(number if is_there else number + 1, line)
    return "\n".join(lines) + "\n"


def line_of(lines: list[str], key: str) -> tuple[int, bool]:
    """The index of a key's line, or else of the nearest section around it; which of them."""
    found, begin = 0, 0
    for depth, name in enumerate(re.sub(r"\[\d+\]", "", key).split(".")):
        for number in range(begin, len(lines)):
            indent = len(lines[number]) - len(lines[number].lstrip())
            if indent < 2 * depth:
                return found, False
            if indent == 2 * depth and lines[number].strip().startswith(f"{name}:"):
                found, begin = number, number + 1
                break
        else:
            return found, False
    return found, True


M = Mistake


def blend(*sources: str) -> str:
    """`data.train: [...]` on one line: sources of text with these settings, others as they
    are."""
    texts = [
        f"{{kind: text, files: [{name}.txt], {one}}}"
        for name, one in zip("ab", sources, strict=False)
    ]
    return f"data.train: [{', '.join([*texts, *sources[2:]])}]"


BLEND = blend("weight: 1", "weight: 1")
CHAT = "{kind: chat, path: org/chats, weight: 1}"
PAIRS = "{kind: preference, path: org/pairs, weight: 1}"

MISTAKES = {
    # types and ranges
    "quoted number": M('training.steps: "100"', "remove the quotes: 100"),
    "float for an int": M("training.steps: 1.5", "write 2"),
    "whole float for an int": M("training.steps: 1e2", "write 100"),
    "underscores": M("training.steps: 1_000", "write 1000"),
    "thousands comma": M('training.steps: "1,000"', "write 1000"),
    "suffix": M("training.steps: 8k", "write 8000"),
    "text for an int": M("training.steps: many", "write an integer ≥ 1"),
    "zero steps": M("training.steps: 0", "write an integer ≥ 1"),
    "negative": M("training.seed: -1", "write an integer ≥ 0"),
    "too large": M("training.seed: 99999999999999999999", "write a smaller number"),
    "bool for an int": M("training.seed: true", "write an integer"),
    "list for an int": M("training.micro_batch_size: [2]", "write an integer"),
    "map for an int": M("training.micro_batch_size: {a: 2}", "auto"),
    "union out of range": M("training.micro_batch_size: 0", "an integer ≥ 1"),
    "misspelt auto": M("training.micro_batch_size: atuo", "mean auto"),
    "infinite": M("optimizer.learning_rate: .inf", "another number"),
    "overflowing": M("optimizer.learning_rate: 1e999", "another number"),
    "not a number": M("optimizer.weight_decay: .nan", "anoth"),
    "number of 5,000 digits": M("training.seed: " + "9" * 5000, "another number"),
    "hexadecimal of 5,000 digits": M("training.seed: 0x" + "f" * 5000, "write an integer"),
    "quoted infinity": M("optimizer.learning_rate: '.inf'", "write a number > 0"),
    "negative rate": M("optimizer.learning_rate: -1", "a number > 0"),
    "quoted float": M("optimizer.weight_decay: '0.1'", "quotes: 0.1"),
    "beta of 1": M("optimizer.betas: [0.9, 1.0]", "a number ≥ 0 and < 1", "optimizer.betas[1]"),
    "one beta": M("optimizer.betas: [0.9]", "a list of 2 numbers ≥ 0 and < 1"),
    "three betas": M("optimizer.betas: [0.9, 0.9, 0.9]", "list of 2 numbers"),
    "scalar for a list": M("data.train.files: '*.py'", '*.py"]'),
    "empty list": M("data.train.files: []", "a list of texts"),
    "number in a list": M("data.train.files: [a, 3]", 'quotes: "3"', "data.train.files[1]"),
    "yes for a boolean": M("parallel.sequence: yes", "write true"),
    "off for a boolean": M("parallel.sequence: off", "write false"),
    "boolean for a word": M("parallel.zero.offload_optimizer: false", "write none"),
    "boolean for a stage": M("parallel.zero.stage: true", "write auto"),
    "stage 4": M("parallel.zero.stage: 4", "write one of 0, 1,"),
    "number for a section": M("parallel.zero: 2", "write {stage: 2}"),
    "word for a list": M("logging.trackers: wandb", "in brackets: [wandb]"),
    "misspelt word in a list": M(
        "logging.trackers: [wandbs]", "did you mean wandb?", "logging.trackers[0]",
    ),
    "misspelt word": M("schedule.name: cosin", "did you mean cosine"),
    "upper case": M("training.precision: FP32", "mean fp32"),
    "name with spaces": M("name: my run", "write my-run"),
    "number for a name": M("name: 7", 'in quotes: "7"'),
    # keys
    "misspelt key": M("training.sede: 1", "did you mean `seed`"),
    "no checkpoint": M("model.init: checkpoint", "add `checkpoint:", "model.checkpoint"),
    "an unused checkpoint": M("model.checkpoint: runs/x", "set model.init to checkpoint"),
    "an objective for other data": M(
        "training.objective: sft", "to pretrain", "data.train.kind",
    ),
    "settings of another objective": M("dpo: {beta: 0.2}", "set training.objective to dpo"),
    "an unknown loss": M("dpo: {loss: kto}", "sigmoid", "dpo.loss"),
    "an adapter": M("training.peft: {r: 8}", "write `adapter`"),
    "rank of adapters in words of PEFT": M("training.lora_r: 8", "write `adapter.rank`"),
    "a misspelt projection": M(
        "adapter: {rank: 4, alpha: 8, targets: [q_prj]}", "did you mean `q_proj`?",
        "adapter.targets",
    ),
    "adapters of rank 0": M("adapter: {rank: 0, alpha: 8}", "an integer ≥ 1", "adapter.rank"),
    "adapters and frozen weights": M(
        "model.freeze: [model.norm.*]", "remove one of model.freeze",
        given=("adapter: {rank: 4, alpha: 8}",),
    ),
    "groups as a map": M(
        "optimizer.groups: {model.embed_tokens.*: 0.5}",
        "write a list of maps of parameters, lr_mult, wd_mult",
    ),
    "another tool's groups": M("optimizer.decoupled_lr: 0.5", "optimizer.groups"),
    "another tool's layer decay": M("optimizer.layerwise_lr_decay: 0.9", "optimizer.groups"),
    "Muon with adapters": M(
        "optimizer.name: muon", "set optimizer.name to adamw",
        given=("adapter: {rank: 4, alpha: 8}",),
    ),
    "nothing similar": M("training.quantize: 4", "docs/recipe.md lists"),
    "misspelt required key": M("training.global_batch_sise: 8", "global_batch"),
    "key at the top": M("learning_rate: 1", "belongs under `optimizer`"),
    "key of another section": M("training.warmup_steps: 3", "`schedule`"),
    "nonsense key": M("training.qqqqqq: 1", "docs/recipe.md"),
    "missing key": M("-training.sequence_length", "under `training`"),
    "missing section": M("-optimizer", "at the top"),
    "missing kind": M("-data.train.kind", "add `kind: text`"),
    "misspelt kind": M("data.train.kind: txt", "did you mean text"),
    "kind of a file": M("data.train.kind: jsonl", "write `kind: text`"),
    "key of another kind": M("data.train.prefix: a", "set kind to megatron"),
    "one of two betas": M("optimizer.betas: 0.8", "write a list of 2 numbers"),
    "offload as a switch": M("parallel.zero.offload_optimizer: true", "write cpu"),
    "PEFT's rank": M("adapter: {r: 8, alpha: 16}", "adapter.rank", "adapter.r"),
    "engine with a stage": M("parallel.engine: zero3", "deepspeed, and `zero: {stage: 3}`"),
    "GPU with other memory": M("cluster.gpu: A100-64GB", "`a100-"),
    "a folder of texts": M("data.train.files: [../..]", "**/*.txt"),
    # YAML
    "colon in a value": M("name: a: b", "quotes", "(file)"),
    "python tag": M("training.seed: !!python/object/apply:os.system [id]", "tag"),
    "own tag": M("training.seed: !env SEED", "remove the tag"),
    "GPU": M("cluster.gpu: p100", "describe yours by the closest"),
    "GPU as a map": M("cluster.gpu: {like: a10g, memory_gib: 3}", "with --cluster"),
    "project with a control character": M(
        'logging.project: "a\\eb"', "write 1 to 128 characters, without"
    ),
    "project with a slash": M(
        "logging.project: team/dmt", "write 1 to 128 characters, without"
    ),
    "NUL character": M('data.tokenizer: "a\\0b"', "character"),
    # other tools' names
    "accumulation": M(
        "training.gradient_accumulation_steps: 4",
        "derived: global_batch_size / (micro_batch_size · dp)",
    ),
    "Megatron's tensor": M("parallel.tensor_model_parallel_size: 2", "`parallel.tensor`"),
    "zero_stage": M("parallel.zero_stage: 2", "parallel.zero.stage"),
    "lr": M("optimizer.lr: 3e-4", "`optimizer.learning_rate`"),
    "max_steps": M("training.max_steps: 100", "`training.steps`"),
    "HF batch": M("training.per_device_train_batch_size: 2", "`training.micro_batch_size`"),
    "HF block": M("bf16: true", "training.precision"),
    "DeepSpeed block": M("zero_optimization: {stage: 2}", "`parallel.zero`"),
    "foreign precision": M("training.precision: bfloat16", "bf16"),
    "foreign optimizer": M("optimizer.name: adamw_torch", "write adamw"),
    # secrets
    "api key": M("logging.wandb_api_key: hunter22", "WANDB_API_KEY"),
    "hub token": M("data.tokenizer: hf_" + "aB3" * 12, "HF_TOKEN"),
    "login in a URL": M(
        'data.train.files: ["https://me:pw@host/x"]', "environment", "data.train.files[0]",
    ),
    # settings that disagree
    "no length": M("-training.steps", "add e.g. `steps: 1000`", "training"),
    "misspelt objective": M("training.objective: pretran", "did you mean pretrain?"),
    "two lengths": M("training.epochs: 2", "remove one"),
    "min above peak": M("schedule.min_learning_rate: 1e-3", "3e-05"),
    "misspelt key of another kind": M(
        "data.train.colums: {}", "did you mean `data.train.columns`?",
    ),
    "two warm-ups": M("schedule.warmup_ratio: 0.1", "remove one"),
    "wsd without decay": M("schedule.name: wsd", "decay_steps:", "schedule.decay_steps"),
    "decay without wsd": M("schedule.decay_steps: 5", "wsd"),
    "shape of a decay without wsd": M("schedule.decay: 1-sqrt", "wsd"),
    "early stopping without validations": M(
        "evaluation.patience: 3", "set evaluation.every_steps",
        given=("-evaluation.every_steps",),
    ),
    "ramp that no layout can spread": M(
        "training.batch_ramp: {start: 4, increment: 3, steps: 10}", "to multiples of 2",
    ),
    "ramp without a length": M(
        "training.batch_ramp: {start: 4, increment: 4}", "add `steps:`",
        "training.batch_ramp.steps",
    ),
    "ramp from the whole batch": M(
        "training.batch_ramp: {start: 8, increment: 4, steps: 10}", "set it to less",
        "training.batch_ramp.start",
    ),
    "no checkpoint of a step that is validated": M(
        "checkpoint.every_steps: 30", "to 50", given=("checkpoint.keep_best: 1",),
    ),
    "settings of another schedule": M("schedule.plateau: {patience: 2}", "name to plateau"),
    "decay too long": M("schedule.decay_steps: 95", "to 90", given=("schedule.name: wsd",)),
    "a part of a config next to a hub id": M(
        "model.hub: a/b", "edit its config.json", "model.config",
        given=("-model.config.model_type",),
    ),
    "pretrained without hub": M("model.init: pretrained", "hub:", "model.hub"),
    "bad model config": M(
        "model.config.hidden_size: 66", "change num_att", "model.config.num_attention_heads",
    ),
    "unknown model config key": M("model.config.hidden_sise: 64", "hidden_size"),
    "sequence too long": M("training.sequence_length: 256", "to 128"),
    "isolated documents scaled by their length": M(
        "model.config.max_position_embeddings: 32", "set it to 32", "training.sequence_length",
        given=("model.config.rope_scaling: {type: dynamic, factor: 4.0}",
               "data.isolate_documents: true"),
    ),
    "nvme without path": M(
        "parallel.zero.stage: 3", "nvme_path:", "parallel.zero.nvme_path",
        given=("parallel.zero.offload_optimizer: nvme",),
    ),
    "path without nvme": M(
        "parallel.zero.nvme_path: /x", "remove it",
        given=("parallel.zero.offload_optimizer: none",
               "parallel.zero.offload_parameters: cpu"),
    ),
    "offloaded parameters below 3": M(
        "parallel.zero.offload_parameters: cpu", "to auto", given=("parallel.zero.stage: 2",),
    ),
    "offload in stage 0": M(
        "parallel.zero.offload_optimizer: cpu", "to auto", given=("parallel.zero.stage: 0",),
    ),
    "ZeRO with ddp": M("parallel.zero.stage: 2", "to auto", given=("parallel.engine: ddp",)),
    "batch not divisible": M("training.global_batch_size: 9", "to 8 or 10"),
    "batch below ranks": M(
        "parallel.engine: ddp", "to 32", "training.global_batch_size",
        given=("cluster.gpus_per_node: 16",),
    ),
    "context beyond the ranks": M("parallel.context: 3", "to auto"),
    "misspelt context": M("parallel.contex: 2", "`context`"),
    "Accelerate's context": M("parallel.cp_size: 2", "`parallel.context`"),
    "length that context cannot split": M(
        "parallel.context: 2", "to auto", given=("training.sequence_length: 66",),
    ),
    "dropout that context splits": M(
        "parallel.context: 2", "to auto", given=("model.config.attention_dropout: 0.1",),
    ),
    "Megatron's exchange": M("kernels: {context: p2p}", "write all_gather", "kernels.context"),
    "exchange without ranks": M(
        "kernels: {context: ulysses}", "context to 2", "kernels.context",
    ),
    "Megatron's context": M("parallel.context_parallel_size: 2", "parallel.context"),
    "fp16 on CPU": M("training.precision: fp16", "to bf16"),
    "NVMe below stage 3": M(
        "parallel.zero.offload_optimizer: nvme", "to auto",
        given=("parallel.zero.stage: 2", "parallel.zero.nvme_path: /x"),
    ),
    "selective recompute": M(
        "parallel.recompute: selective", "to auto", given=("parallel.model: hf",),
    ),
    "unknown gpu": M("cluster.gpu: h100-80", "h100-80gb"),
    "evaluation without data": M(
        "-data.validation_fraction", "validation_fraction", "evaluation.every_steps",
    ),
    "packing of text": M("data.packing: greedy", "write none or best_fit"),
    "packing as TRL has it": M("data.packing: true", "greedy for chats"),
    "reinforcement learning": M(
        "training.objective: grpo", "on given answers only: write dpo or orpo",
    ),
    "an optimizer that DeepSpeed has removed": M(
        "optimizer.name: OneBitAdam", "parallel.outer",
    ),
    "noise of TRL": M("training.neftune: 5", "remove it"),
    "early stopping": M("training.early_stopping: 5", "`evaluation.patience`"),
    "generation": M("training.predict_with_generate: true", "docs/checkpoints.md"),
    "the best model": M("training.load_best_model_at_end: true", "checkpoint.keep_best"),
    "completions": M("data.completion_only: true", "data.train.loss_on"),
    "chat template for text": M("data.chat_template: chatml", "kind: chat"),
    "preferences without a comparison": M(
        "data.train.kind: preference", "dpo or orpo",
        given=("data.train.path: org/pairs", "-data.train.files"),
    ),
    "text to validate chats": M(
        'data.validation: {kind: text, files: ["{stdlib}/this.py"]}', "validation_fraction",
        "data.validation.kind",
        given=("data.train: {kind: chat, path: org/chats}", "-data.validation_fraction",
               "training.objective: sft"),
    ),
    "documents that are dropped": M(
        "data.train.malformed: drop", "correct or remove",
        given=("data.train.kind: hf", "data.train.path: org/texts", "-data.train.files"),
    ),
    "weight of one source": M("data.train.weight: 1", "write data.train as"),
    "stages of one source": M(
        "data.stages: [{from_step: 5, weights: {a: 1}}]", "list of sources",
        "data.stages[0].weights",
    ),
    "a stage that changes nothing": M(
        "data.stages: [{from_step: 5}]", "add", "data.stages[0].weights",
    ),
    "documents alone for conversations": M(
        "training.objective: sft", "pretrain", "data.train.kind",
    ),
    "misspelt column": M(
        "data.train.columns: {mesages: x}", "did you mean `messages`?",
        "data.train.columns.mesages",
        given=("data.train.kind: chat", "data.train.path: org/chats"),
    ),
    "two validation sources": M(
        "data.validation: {kind: text, files: [a]}", "remove one", "data.validation_fraction",
    ),
    "virtual without stages": M(
        "parallel.virtual_pipeline: 2", "auto", given=("parallel.pipeline: 1",),
    ),
    "sequence without tensor": M(
        "parallel.sequence: true", "auto", given=("parallel.tensor: 1",),
    ),
    "pipeline with ZeRO 3": M(
        "parallel.pipeline: 2", "to auto", given=("parallel.zero.stage: 3",),
    ),
    "tensor with fsdp": M("parallel.tensor: 2", "to auto", given=("parallel.engine: fsdp",)),
    "engine and model": M(
        "parallel.model: megatron", "to auto", given=("parallel.engine: ddp",),
    ),
    "megatron with ZeRO 2": M(
        "parallel.zero.stage: 2", "to auto", given=("parallel.engine: megatron",),
    ),
    "megatron with a DeepSpeed file": M(
        "parallel.zero.config: zero1", "remove it", given=("parallel.engine: megatron",),
    ),
    "experts of a dense model": M("parallel.expert: 2", "to auto"),
    "MLP that tensor cannot split": M(
        "parallel.tensor: 2", "to auto", given=("model.config.intermediate_size: 129",),
    ),
    "sequence that tensor cannot split": M(
        "parallel.sequence: true", "to auto",
        given=("training.sequence_length: 63", "parallel.tensor: 2"),
    ),
    "more stages than layers": M(
        "parallel.pipeline: 2", "to auto", given=("model.config.num_hidden_layers: 1",),
    ),
    "more chunks than layers": M(
        "parallel.virtual_pipeline: 2", "to auto", given=("parallel.pipeline: 2",),
    ),
    "a model that megatron lacks": M(
        "model.config.hidden_act: relu", "model to hf", "model.config",
        given=("parallel.model: megatron",),
    ),
    "the router's loss": M(
        "model.config.output_router_logits: true", "set model.balance: {kind: sequence_loss",
        given=("model.config.model_type: mixtral",),
    ),
    "balance without experts": M("model.balance: {z_loss: 0.001}", "remove"),
    "a bias that an export would lack": M(
        "model.balance: {kind: bias, bias_update: 0.001}",
        "to {kind: sequence_loss, coefficient: 0.001}", "model.balance.kind",
        given=("model.config.model_type: mixtral",),
    ),
    "a bias that does not move": M(
        "model.balance: {bias_update: 0.001}", "kind to bias", "model.balance.bias_update",
        given=("model.config.model_type: mixtral",),
    ),
    "balance without a coefficient": M(
        "model.balance: {kind: sequence_loss}", "add `coefficient:",
        "model.balance.coefficient", given=("model.config.model_type: mixtral",),
    ),
    "elastic with a launcher of one machine": M(
        "launch.elastic: {min_nodes: 1, max_nodes: 2}",
        "launch.launcher to local, slurm or ray",
        given=("launch.launcher: kubernetes", "launch.max_restarts: 1"),
    ),
    "elastic without restarts": M(
        "launch.max_restarts: 0", "set it to 3",
        given=("launch.elastic: {min_nodes: 1, max_nodes: 2}",),
    ),
    "more machines than an elastic run may have": M(
        "launch.max_restarts: 1", "number at the start", "cluster.nodes",
        given=("launch.elastic: {min_nodes: 2, max_nodes: 3}",),
    ),
    "elastic with a number that has no layout": M(
        "launch.elastic: {min_nodes: 1, max_nodes: 2}",
        "with 2: set training.global_batch_size to 16",
        given=("parallel.engine: ddp", "training.micro_batch_size: 4",
               "launch.max_restarts: 1"),
    ),
    "no warm-up next to one": M(
        "schedule.warmup_ratio: 0", "or `schedule.warmup_steps: 0` where it comes from",
    ),
    "fsdp with half an offload": M(
        "parallel.zero.offload_optimizer: cpu", "to auto",
        given=("parallel.engine: fsdp", "parallel.zero.stage: 3",
               "parallel.zero.offload_parameters: none"),
    ),
    "tensor parallel in other words": M("parallel.tensor_parallel: 2", "`parallel.tensor`"),
    "adapters nowhere": M(
        "adapter: {rank: 4, alpha: 8, targets: []}", "write one of all-linear",
        "adapter.targets",
    ),
    # lists
    "source without a weight": M(
        blend("weight: 1", "label: b"), "add e.g. `weight: 1`", "data.train[1].weight",
    ),
    "weights and epochs": M(
        blend("weight: 1", "epochs: 2"), "write weight", "data.train[1].epochs",
    ),
    "weights without a sum": M(
        blend("weight: 0", "weight: 0"), "raise a weight", "data.train",
    ),
    "two sources of one name": M(
        blend("weight: 1, label: a", "weight: 1, label: a"), "`label`", "data.train[1].label",
    ),
    "sources of two kinds": M(
        blend("weight: 1", "weight: 1", CHAT), "objective to sft", "data.train[2].kind",
    ),
    "conversations and preferences": M(
        blend("weight: 1", "weight: 1", PAIRS), "one after the other", "data.train[2].kind",
    ),
    "packed conversations and documents that are not isolated": M(
        "data.packing: greedy", "set it to true", "data.isolate_documents",
        given=("training.objective: sft", blend("weight: 1", "weight: 1", CHAT)),
    ),
    "misspelt key of a listed source": M(
        blend("weight: 1", "wieght: 1"), "`weight`", "data.train[1].wieght",
    ),
    "wrong kind of a listed source": M(
        blend("weight: 1", "weight: 1", "{kind: txt, weight: 1}"), "did you mean text",
        "data.train[2].kind",
    ),
    "an epoch of weights": M(
        "training.epochs: 2", "training.steps", given=("-training.steps", BLEND),
    ),
    "a stage that forgets a source": M(
        "data.stages: [{from_step: 5, weights: {a.txt: 1}}]", "name every source once",
        "data.stages[0].weights", given=(BLEND,),
    ),
    "stages out of order": M(
        "data.stages: [{from_step: 5, weights: {a.txt: 1, b.txt: 2}}, "
        "{from_step: 5, weights: {a.txt: 1, b.txt: 1}}]",
        "in order", "data.stages[1]", given=(BLEND,),
    ),
    "a stage that begins nowhere": M(
        "data.stages: [{weights: {a.txt: 1, b.txt: 2}}]", "from_step",
        "data.stages[0].from_step", given=(BLEND,),
    ),
    "stages of epochs": M(
        "data.stages: [{from_step: 5, weights: {a.txt: 1, b.txt: 2}}]", "with `weight`",
        "data.stages[0].weights", given=(blend("epochs: 1", "epochs: 1"),),
    ),
    "multiplier of a group": M(
        "optimizer.groups: [{parameters: [model.*], lr_mult: 0}]", "write a number > 0",
        "optimizer.groups[0].lr_mult",
    ),
    "key of a group": M(
        "optimizer.groups: [{parameters: [model.*], weight_mult: 0}]", "did you mean",
        "optimizer.groups[0].weight_mult",
    ),
    "missing key of a group": M(
        "optimizer.groups: [{lr_mult: 0.5}]", "add `parameters:` under `optimizer.groups[0]`",
        "optimizer.groups[0].parameters",
    ),
    "replicas and a growing batch": M(
        "training.batch_ramp: {start: 4, increment: 4, steps: 10}", "remove one of",
        given=("parallel.outer: {replicas: 2, every_steps: 10}",),
    ),
    "replicas that save between exchanges": M(
        "parallel.outer: {replicas: 2, every_steps: 30}", "to 60", "checkpoint.every_steps",
    ),
    "samples that move on one rank": M(
        "parallel.balance: auto", "set it to none", given=("cluster.gpus_per_node: 1",),
    ),
    "samples that move without checkpoints": M(
        "parallel.balance: auto", "set checkpoint.every_steps",
        given=("checkpoint.every_steps: null",),
    ),
    "containers of a pod as a map": M(
        "launch.kubernetes: {pod: {containers: {name: a}}}", "write `containers: [{…}]`",
        "launch.kubernetes.pod.containers",
    ),
}  # fmt: skip
EDITS = {
    "null for a required int": Edit(
        "sequence_length: 64", "sequence_length:", "training.sequence_length", "integer ≥ 2"
    ),
    "a group without parameters": Edit(
        "weight_decay: 0.1",
        "groups:\n    - parameters: [model.*]\n      lr_mult: 0.5\n    - parameters: [modle.*]",
        "optimizer.groups[1].parameters",
        "lists the names",
        at="- parameters: [modle.*]",
    ),
    "wrong value in a listed source": Edit(
        '    kind: text\n    files: ["{stdlib}/*.py"]',
        "    - {kind: text, files: [a], weight: 1}\n    - {kind: text, files: [b], weight: -1}",
        "data.train[1].weight",
        "write a number ≥ 0",
        at="weight: -1",
    ),
    "misspelt section": Edit("launch:", "lanch:", "lanch", "did you mean `launch`"),
    "key twice": Edit(
        "seed: 1", "seed: 1\n  seed: 2", "training.seed", "remove one", at="seed: 2"
    ),
    "number as a key": Edit("seed: 1", "3: 1", "training", 'quotes: "3"'),
    "tab": Edit("  seed: 1", "\tseed: 1", "(file)", "spaces, not tabs"),
    "open bracket": Edit(
        "betas: [0.9, 0.95]", "betas: [0.9, 0.95", "(file)", "fix the YAML", at="weight_decay"
    ),
    "unknown alias": Edit("seed: 1", "seed: *other", "(file)", "fix the YAML"),
    "control character": Edit(
        "tokenizer: bytes", "tokenizer: a\x07b", "(file)", "fix the YAML"
    ),
    "second document": Edit(
        "seed: 1", "seed: 1\n---\nname: b", "(file)", "one document", at="---"
    ),
}  # fmt: skip


def problems_of(path: Path, dmt: Dmt, *options: str) -> list[dict]:
    """Problems from `dmt check --json`, which must exit with 2 and show no traceback."""
    captured = dmt("check", "--json", path, *options, code=2)
    assert "Traceback" not in captured.out + captured.err
    (recipe,) = json.loads(captured.out)["recipes"]
    assert recipe["file"] == str(path)
    assert not recipe["ok"]
    return list(recipe["problems"])


@pytest.mark.parametrize(
    "mistake", [*MISTAKES.values(), *EDITS.values()], ids=[*MISTAKES, *EDITS]
)
def test_one_clear_problem(mistake: Mistake | Edit, tmp_path: Path, dmt: Dmt) -> None:
    text, key, line = mistake.spoil()
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    found = [one for one in problems_of(path, dmt) if not _absent(one, key)]
    assert len(found) == 1, found
    (problem,) = found
    assert (problem["key"], problem["file"], problem["line"]) == (key, str(path), line)
    assert mistake.fix in problem["fix"]
    assert problem["found"]
    assert problem["allowed"]


def _absent(problem: dict[str, str], key: str) -> bool:
    """Whether it is about a source that the case names only as an example."""
    place = re.fullmatch(
        r"data\.(train|validation)(\[\d\])?\.(files|path|prefix)", problem["key"]
    )
    return place is not None and problem["key"] != key


def test_notes_stand_next_to_problems(tmp_path: Path, dmt: Dmt) -> None:
    """Of a broken rule, and of what only the plan finds."""
    path = tmp_path / "recipe.yaml"
    for statement in ("training.global_batch_size: 9", "parallel.zero.config: ./none.json"):
        path.write_text(stated("optimizer.learning_rate: 300", statement))
        note = "note  optimizer.learning_rate: 300 is far above what AdamW uses"
        assert note in dmt("check", path, code=2).err


TEN_OF = {
    "name": "a/b", "model.config.hidden_size": "x", "model.config.num_attention_heads": 4.5,
    "model.config.hiden_size": 64, "model.init": "scratch", "model.freeze": "lm_head",
    "model.hub": 7, "data.train.kind": "txt", "data.train.files": ["none/*.md"],
    "data.train.path": "x.jsonl", "data.validation_fraction": 1.5,
    "data.tokenizer": "./none", "data.packing": "greedy", "data.isolate_documents": "yes",
    "data.chat_template": "chatml", "training.steps": "2k",
    "training.tokens": 1e6, "training.sequence_length": 1024, "training.global_batch_size": 7,
    "training.micro_batch_size": 0, "training.precision": "fp16", "training.seed": -1,
    "training.objective": "grpo", "training.lr": 1e-4, "optimizer.name": "adamv",
    "optimizer.learning_rate": "3e-4x", "optimizer.betas": 0.9, "optimizer.weight_decay": -1,
    "optimizer.muon": {"momentum": 0.9}, "optimizer.momentum": 0.9, "schedule.name": "cosinus",
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
