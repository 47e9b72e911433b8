"""Arguments of Megatron-LM's `pretrain_gpt.py`: a list of them, or the script that passes them.

Names and meaning are those of core_v0.16.1, as in `engines/megatron/pretrain_gpt.py`, which
renders them. torchrun's own flags in such a script count as well.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from toolkit.engines.megatron import pretrain_gpt
from toolkit.engines.megatron.pretrain_gpt import (
    GPT_SWITCHES,
    GPT_VALUES,
    TRANSFORMER_SWITCHES,
    TRANSFORMER_VALUES,
)
from toolkit.engines.megatron.pretrain_gpt_run import WSD_DECAYS
from toolkit.recipe.yaml_nodes import Value
from toolkit.targets.shell_flags import Flag, read_flags
from toolkit.targets.source import (
    CONTEXT_PARALLEL,
    Collected,
    OneOf,
    SettingSource,
    Stated,
    as_yaml,
    number,
    translated,
    unknown,
)

KIND = "Megatron-LM arguments"

OPTIONS = Path(pretrain_gpt.__file__).with_name("pretrain_gpt_options.txt")
"""Every option of Megatron-LM core_v0.16.1, which cannot be installed, and its values."""

_TORCHRUN = """
    local-addr log-dir logs-specs master-addr master-port max-restarts module
    monitor-interval nnodes no-python node-rank nproc-per-node rdzv-backend rdzv-conf
    rdzv-endpoint rdzv-id redirects role run-path standalone start-method tee
"""
TORCHRUN = frozenset(f"--{name}" for name in _TORCHRUN.split())
"""Options of the launcher that starts it in the same script."""

_SAME: Mapping[str, str] = {
    "--micro-batch-size": "training.micro_batch_size",
    "--global-batch-size": "training.global_batch_size",
    "--seq-length": "training.sequence_length",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
    "--lr": "optimizer.learning_rate",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.betas[0]",
    "--adam-beta2": "optimizer.betas[1]",
    "--adam-eps": "optimizer.eps",
    "--min-lr": "schedule.min_learning_rate",
    "--lr-decay-iters": "training.steps",
    "--lr-wsd-decay-iters": "schedule.decay_steps",
    "--tensor-model-parallel-size": "parallel.tensor",
    "--pipeline-model-parallel-size": "parallel.pipeline",
    "--num-virtual-stages-per-pipeline-rank": "parallel.virtual_pipeline",
    "--context-parallel-size": CONTEXT_PARALLEL,
    "--expert-model-parallel-size": "parallel.expert",
    "--log-interval": "logging.every_steps",
    "--wandb-project": "logging.wandb.project",
    "--wandb-entity": "logging.wandb.entity",
    "--wandb-exp-name": "name",
    "--tokenizer-model": "data.tokenizer",
    "--data-path": "data.train.prefix",
    "--train-data-path": "data.train.prefix",
    "--valid-data-path": "data.validation.prefix",
    "--num-query-groups": "megatron.num_query_groups",
    "--rotary-base": "megatron.rotary_base",
    "--max-position-embeddings": "megatron.max_sequence_length",
    "--nnodes": "cluster.nodes",
    "--nproc-per-node": "cluster.gpus_per_node",
}
"""Flags whose value means the same in a recipe."""

_SWITCHES: Mapping[str, tuple[str, object]] = {
    "--sequence-parallel": ("parallel.sequence", True),
    "--use-distributed-optimizer": ("parallel.zero.stage", 1),
    "--recompute-activations": ("parallel.recompute", "selective"),
    "--bf16": ("training.precision", "bf16"),
    "--fp16": ("training.precision", "fp16"),
    "--fp8-format": ("training.precision", "fp8"),
    "--tensorboard-dir": ("logging.tensorboard", True),
}
"""Flags that say one thing, whatever their value: the setting and what they say of it."""

_STAGES = "--pipeline-model-parallel-size"

_SAID_ELSEWHERE = frozenset(("--lr-warmup-init", "--group-query-attention", "--tokenizer-type"))
"""Parts of what another flag states."""


def read(text: str, name: str) -> SettingSource:
    """What the arguments state. Raises RecipeError where they are no shell words."""
    found = _Reader(read_flags(text, name), name).collect()
    return found.source(
        name,
        KIND,
        "recipe",
        "DMT does not read these arguments (`dmt render --to megatron-lm` writes them): the "
        "recipe takes precedence",
        "Megatron-LM's pretrain_gpt.py reads only them: there they take precedence",
    )


class _Reader:
    def __init__(self, flags: list[Flag], file: str) -> None:
        # argparse takes a name with either kind of dash, and the last of several.
        self.flags = {flag.name.replace("_", "-"): flag for flag in flags}
        self.file = file
        self.found = Collected()

    def collect(self) -> Collected:
        """Everything that the arguments state."""
        switches = {flag: (name, value) for name, (value, flag) in _model_switches().items()}
        values = {flag: name for name, flag in {**TRANSFORMER_VALUES, **GPT_VALUES}.items()}
        for name, flag in self.flags.items():
            if name in _SAME:
                self._same(name, flag, _SAME[name])
            elif name in _SWITCHES:
                self._add(flag, *_SWITCHES[name])
            elif name in switches:
                self._add(flag, f"megatron.{switches[name][0]}", switches[name][1])
            elif name in values:
                self._same(name, flag, f"megatron.{values[name]}")
            elif rule := _RULES.get(name):
                for key, value in rule(self):
                    self._add(flag, key, value)
            elif name not in _SAID_ELSEWHERE:
                self._other(name, flag)
        return self.found

    def value(self, name: str) -> Value:
        """The value of a flag; None if absent."""
        flag = self.flags.get(name)
        return None if flag is None else _value(flag)

    def number(self, name: str) -> float | None:
        """The value of a flag, if present and a number."""
        return number(self.value(name))

    def _same(self, name: str, flag: Flag, key: str) -> None:
        value = _value(flag)
        self._add(flag, key, value if name != "--tokenizer-model" else str(value))

    def _add(self, flag: Flag, key: str, value: object) -> None:
        place = f"{self.file}:{flag.line}"
        at = (flag.name, flag.values[0] if flag.values else "given", place)
        if not flag.values:
            advice = f"remove `{flag.name}` at {place}, or change the recipe"
            self.found.stated.append(Stated(key, value, *at, advice=advice))
        elif "$" in flag.values[0]:
            advice = f"only the shell knows {flag.values[0]}"
            self.found.stated.append(Stated(key, value, *at, certain=False, advice=advice))
        else:
            self.found.stated.append(Stated(key, value, *at))

    def _other(self, name: str, flag: Flag) -> None:
        """A flag that no recipe has, a misspelt one, or that of another program."""
        known = megatron_options() | TORCHRUN
        guess = unknown(name, f"{self.file}:{flag.line}", known)
        if name in known or not guess.hint:
            self.found.only_there.append(flag.name)
        else:
            self.found.unknown.append(guess)


@cache
def megatron_options() -> frozenset[str]:
    """Names of Megatron-LM's options."""
    lines = OPTIONS.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[0] for line in lines if line.startswith("--"))


def _model_switches() -> dict[str, tuple[bool, str]]:
    """Those of a model, not of its layout or precision."""
    other = set(_SWITCHES) | {"--calculate-per-token-loss"}
    return {
        name: (value, flag)
        for name, (value, flag) in {**TRANSFORMER_SWITCHES, **GPT_SWITCHES}.items()
        if flag not in other and not flag.startswith(("--no-", "--moe"))
    }


def _value(flag: Flag) -> Value:
    """The first value, as YAML reads it."""
    return as_yaml(flag.values[0]) if flag.values else None


Meaning = Iterator[tuple[str, object]]
Rule = Callable[[_Reader], Meaning]


def _optimizer(reader: _Reader) -> Meaning:
    # Megatron-LM's adam decouples the weight decay unless an argument says not to.
    yield "optimizer.name", translated("optimizer.name", reader.value("--optimizer"))


def _clipping(reader: _Reader) -> Meaning:
    yield "optimizer.clip_grad_norm", reader.value("--clip-grad") or None


def _samples(reader: _Reader) -> Meaning:
    samples, batch = reader.number("--train-samples"), reader.number("--global-batch-size")
    if samples and batch:
        yield "training.steps", math.ceil(samples / batch)


def _warmup(reader: _Reader) -> Meaning:
    """A warm-up that begins at DMT's first rate is one step shorter than one from 0."""
    steps, first = reader.number("--lr-warmup-iters"), reader.number("--lr-warmup-init")
    peak = reader.number("--lr")
    if steps is None:
        return
    if first and peak and math.isclose(first * (steps + 1), peak, rel_tol=1e-6):
        yield "schedule.warmup_steps", int(steps) + 1
    else:
        yield "schedule.warmup_steps", OneOf((0, 1)) if steps == 0 else steps


def _style(reader: _Reader) -> Meaning:
    style = str(reader.value("--lr-decay-style"))
    if style == "WSD":
        decays = reader.value("--lr-wsd-decay-style")
        style = "wsd" if decays else "wsd with an exponential decay"
    yield "schedule.name", style


def _wsd_decay(reader: _Reader) -> Meaning:
    shape = str(reader.value("--lr-wsd-decay-style"))
    if reader.value("--lr-decay-style") == "WSD":
        ours = {theirs: name for name, theirs in WSD_DECAYS.items()}
        yield "schedule.decay", ours.get(shape, shape)


def _warmup_share(reader: _Reader) -> Meaning:
    share, steps = reader.number("--lr-warmup-fraction"), reader.number("--train-iters")
    if share is not None and steps is not None:
        yield "schedule.warmup_steps", round(share * steps)


def _recompute(reader: _Reader) -> Meaning:
    """`block` is for so many layers of each chunk; other methods group all of them."""
    block = reader.value("--recompute-method") == "block"
    said = "--recompute-num-layers" if block else "--recompute-granularity"
    yield "parallel.recompute", reader.value(said)


def _interval(flag: str, key: str) -> Rule:
    def rule(reader: _Reader) -> Meaning:
        # An interval of the whole run is what a recipe calls null: only at the end.
        value = reader.value(flag)
        whole = value is not None and value == reader.number("--train-iters")
        yield key, OneOf((None, value)) if whole else value

    return rule


def _validation(reader: _Reader) -> Meaning:
    if batches := reader.value("--eval-iters"):
        yield "evaluation.batches", batches


def _chunk(reader: _Reader) -> Meaning:
    layers, stages = reader.number("--num-layers"), reader.number(_STAGES)
    chunk = reader.number("--num-layers-per-virtual-pipeline-stage")
    if layers and stages and chunk:
        yield "parallel.virtual_pipeline", int(layers // (stages * chunk))


def _pipeline_layout(reader: _Reader) -> Meaning:
    stages, text = reader.number(_STAGES), reader.value("--pipeline-model-parallel-layout")
    if stages and text:
        chunks = str(text).count("|") + 1
        yield "parallel.virtual_pipeline", int(chunks // stages)


_RULES: Mapping[str, Rule] = {
    "--recompute-granularity": _recompute,
    "--optimizer": _optimizer,
    "--clip-grad": _clipping,
    "--train-samples": _samples,
    "--lr-warmup-iters": _warmup,
    "--lr-warmup-fraction": _warmup_share,
    "--lr-decay-style": _style,
    "--lr-wsd-decay-style": _wsd_decay,
    "--eval-interval": _interval("--eval-interval", "evaluation.every_steps"),
    "--save-interval": _interval("--save-interval", "checkpoint.every_steps"),
    "--eval-iters": _validation,
    "--num-layers-per-virtual-pipeline-stage": _chunk,
    "--pipeline-model-parallel-layout": _pipeline_layout,
}
"""Flags whose meaning depends on others."""
