"""The current environment: settings of launchers, Accelerate, W&B and others."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from toolkit.backend import BACKENDS
from toolkit.engines import deterministic
from toolkit.errors import RecipeError
from toolkit.foreign import accelerate, files
from toolkit.foreign.base import (
    NO_SETTING,
    WORLD,
    AtMost,
    ForeignSetting,
    Leftover,
    OneOf,
    SettingSource,
    Stated,
    Unknown,
    as_yaml,
)
from toolkit.launcher import LAUNCHERS
from toolkit.recipe.schema import Recipe, RowsSource
from toolkit.recipe.yaml_nodes import Value

NAME = "env"
KIND = "environment"
WHO = (
    "`dmt launch` clears what launchers around it left and passes the rest on; its workers, "
    "and launch/train.py, follow the recipe",
    "a script with its own Accelerator: ACCELERATE_* and FSDP_* win where it leaves them open",
)

Starting = Literal["launch", "worker"]
"""`dmt launch` starts its own workers; launch/train.py was started by another launcher."""

_ACCELERATE: Mapping[str, str] = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}
"""Variables of `accelerate launch` → its arguments; others differ in their prefix only."""

SWITCHES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ACCELERATE_USE_DEEPSPEED": ("DEEPSPEED", ("ACCELERATE_DEEPSPEED_",)),
    "ACCELERATE_USE_FSDP": ("FSDP", ("FSDP_",)),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM", ("MEGATRON_LM_",)),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("", ("PARALLELISM_CONFIG_",)),
}
"""The switch, the distributed_type that it means (a parallelism config has none), and the
variables that count only then."""

_UNASKED = ("ACCELERATE_DYNAMO_", "ACCELERATE_CONFIG_DS_FIELDS")
"""Other variables that Accelerate reads for settings that a script does not make."""

_RANKS: Mapping[str, str] = {
    "WORLD_SIZE": WORLD,
    "LOCAL_WORLD_SIZE": "cluster.gpus_per_node",
    "GROUP_WORLD_SIZE": "cluster.nodes",
    "NNODES": "cluster.nodes",
    "SLURM_NNODES": "cluster.nodes",
    "TORCHELASTIC_MAX_RESTARTS": "launch.max_restarts",
}
"""The number of processes started by an outer launcher, and how."""

_TORCHRUN: Mapping[str, str] = {
    "PET_NNODES": "cluster.nodes",
    "PET_NPROC_PER_NODE": "cluster.gpus_per_node",
    "PET_MAX_RESTARTS": "launch.max_restarts",
}
"""What torchrun takes for flags that it is not given; DMT gives it --nproc-per-node."""

_WANDB: Mapping[str, str] = {
    "WANDB_MODE": "logging.wandb.mode",
    "WANDB_PROJECT": "logging.wandb.project",
    "WANDB_NAME": "name",
}
"""What DMT passes to W&B itself, whatever the variable says."""

_LONGEST = 80
"""Longest value shown, in characters."""

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")

_PREFIXES = (
    *("ACCELERATE_", "CUBLAS_", "CUDA_", "DEEPSPEED_", "DMT_", "DS_", "FSDP_", "GLOO_", "HF_"),
    *("LOCAL_", "MASTER_", "MEGATRON_LM_", "NCCL_", "NVTE_", "OMP_", "PARALLELISM_CONFIG_"),
    *("PET_", "PYTORCH_", "SLURM_", "TORCH_", "TORCHELASTIC_", "TRANSFORMERS_", "WANDB_"),
)
_NAMES = (
    *("RANK", "WORLD_SIZE", "NNODES", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *(BACKENDS[engine].device_variable for engine in BACKENDS.names),
)


def read(
    recipe: Recipe, environ: Mapping[str, str], starting: Starting | None = None
) -> list[SettingSource]:
    """What the environment states, and the config file that Accelerate reads unasked.

    `starting` says who starts the workers, where that is known: it decides which setting
    takes precedence.
    Raises RecipeError when a DeepSpeed config that a variable names cannot be read.
    """
    sources = [_Reader(recipe, environ, starting).source()]
    if starting != "worker" and (path := default_config(environ)) is not None:
        sources.append(_default_config(path, recipe))
    return sources


def accelerate_settings(environ: Mapping[str, str]) -> list[str]:
    """The variables by which a launcher overrules an Accelerator that was given only a part."""
    prefixes = [prefix for _, prefixes in SWITCHES.values() for prefix in prefixes]
    return [
        name
        for name in environ
        if name in _ACCELERATE or name in SWITCHES or name.startswith((*prefixes, *_UNASKED))
    ]


def mesh_variables(sizes: Mapping[str, object]) -> dict[str, str]:
    """What `accelerate launch` makes of a `ParallelismConfig` by the names of its fields."""
    stated = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **stated} if stated else {}


def default_config(environ: Mapping[str, str]) -> Path | None:
    """The file that `accelerate launch` reads when it is given none; None without one."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = Path(environ.get("HF_HOME") or cache).expanduser() / "accelerate"
    files = (folder / "default_config.yaml", folder / "default_config.json")
    return next((file for file in files if file.is_file()), None)


def _default_config(path: Path, recipe: Recipe) -> SettingSource:
    try:
        found = files.read_source(path, recipe)
    except RecipeError as error:
        wrong = Unknown(path.name, str(path), error.problems[0].found)
        found = SettingSource(str(path), accelerate.TARGET.kind, unknown=[wrong])
    found.who = (
        "`accelerate launch` without --config_file reads this file and starts num_processes of "
        "launch/train.py; otherwise the recipe takes precedence; `dmt launch` does not read it",
        "a script with its own Accelerator: this file takes precedence under accelerate launch",
    )
    return found


class _Reader:
    """Goes through the variables once."""

    def __init__(
        self, recipe: Recipe, environ: Mapping[str, str], starting: Starting | None
    ) -> None:
        self.recipe = recipe
        self.environ = {
            name: text
            for name, text in environ.items()
            if name in _NAMES or name.startswith(_PREFIXES)
        }
        self.starting = starting
        self.asleep: list[str] = []
        """Variables that Accelerate reads in a special way."""

    def source(self) -> SettingSource:
        """Everything that they state."""
        found = self._accelerate()
        found.stated += [
            *self._ranks(), *self._torchrun(), *self._devices(), *self._wandb(),
            *self._deterministic(), *self._others(),
        ]  # fmt: skip
        found.leftovers = list(self._leftovers(found))
        found.name, found.kind, found.who = NAME, KIND, WHO
        return found

    def _leftovers(self, found: SettingSource) -> Iterator[Leftover]:
        """Unused variables; Slurm's many are only counted."""
        said = {stated.at.place for stated in found.stated} | SWITCHES.keys() | {*self.asleep}
        rest = sorted(self.environ.keys() - said)
        slurm = sum(name.startswith("SLURM_") for name in rest)
        unread = [(name, NO_SETTING) for name in rest if not name.startswith("SLURM_")]
        unread += [(name, "not in effect") for name in self.asleep]
        unread += [(f"SLURM_* ({slurm})", "Slurm's own")] if slurm else []
        for name, reason in unread:
            yield Leftover(ForeignSetting(name, None, name), reason)

    def _value(self, name: str) -> Value:
        return as_yaml(self.environ[name])

    def _is_on(self, name: str) -> bool:
        return self.environ.get(name, "").lower() in ("1", "true", "yes", "on")

    def _stated(self, name: str, key: str, value: object, **more: Any) -> Stated:
        text = self.environ[name]
        text = text if len(text) < _LONGEST else f"{text[: _LONGEST - 1]}…"
        more = {"advice": f"unset {name}, or make it agree", **more}
        return Stated(key, value, ForeignSetting(name, text, name), **more)

    def _accelerate(self) -> SettingSource:
        """As if they were the config file that `accelerate launch` made them of."""
        settings = {}
        for name, text in self.environ.items():
            if name in SWITCHES and self._is_on(name) and (kind := SWITCHES[name][0]):
                settings["distributed_type"] = ForeignSetting(name, kind, name, text)
        for name in self.environ:
            argument = _ACCELERATE.get(name)
            if name.startswith(("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")):
                argument = name.lower()
            if argument is None:
                continue
            if self._in_effect(name):
                settings[argument] = ForeignSetting(name, self._value(name), name)
            else:
                self.asleep.append(name)
        return accelerate.collect(settings, Path())

    def _in_effect(self, name: str) -> bool:
        if name == "ACCELERATE_MIXED_PRECISION" and self._value(name) == "no":
            # Written for every run. With DeepSpeed's JSON it has no effect, and without a
            # config file it only means that none was asked for.
            return "mixed_precision" in self.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "")
        for switch, (_, prefixes) in SWITCHES.items():
            if name.startswith(prefixes):
                return self._is_on(switch)
        return True

    def _counts(self, keys: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
        """Of variables that are whole numbers: name, the recipe's key, and value."""
        for name, key in keys.items():
            value = self._value(name) if name in self.environ else None
            if isinstance(value, int):
                yield name, key, value

    def _ranks(self) -> Iterator[Stated]:
        for name, key, value in self._counts(_RANKS):
            if self.starting == "launch":
                yield self._stated(name, key, value)
            elif key == WORLD:
                advice = (
                    f"start as many as the recipe says, or --set cluster.nodes=N --set "
                    f"cluster.gpus_per_node=M; `dmt launch` ignores {name}"
                )
                yield self._stated(name, key, value, winner="refused", advice=advice)
            else:
                advice = f"--set {key}={value}: the plan is then made for what was started"
                yield self._stated(name, key, value, winner="launcher", advice=advice)

    def _torchrun(self) -> Iterator[Stated]:
        flags = LAUNCHERS[self.recipe.launch.launcher].flags_from
        for name, key, value in self._counts(_TORCHRUN):
            ours = self.starting == "launch" and bool(flags) and name.startswith(flags)
            asked = ours and name != "PET_NPROC_PER_NODE"
            winner = "torchrun" if asked or self.starting is None else "recipe"
            # DMT starts one agent: with more, it would wait for the others indefinitely.
            breaks = ours and name == "PET_NNODES"
            yield self._stated(name, key, value, winner=winner, breaks=breaks)

    def _devices(self) -> Iterator[Stated]:
        gpu = self.recipe.cluster.gpu
        if gpu != "cpu" and (visible := self.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
            yield self._stated(
                "CUDA_VISIBLE_DEVICES",
                "cluster.gpus_per_node",
                AtMost(len(names)),
                winner="environment",
                advice="list as many GPUs as cluster.gpus_per_node, or unset it",
                breaks=self.starting == "launch",
            )
        for engine in BACKENDS.names:
            variable = BACKENDS[engine].device_variable
            if (asked := self.environ.get(variable)) is None:
                continue
            same = (asked == "cpu") == (gpu == "cpu")
            # `dmt launch` sets it for CPUs itself.
            overridden = self.starting == "launch" and gpu == "cpu"
            yield self._stated(
                variable,
                "cluster.gpu",
                gpu if same else asked,
                winner="recipe" if overridden else "environment",
                breaks=not overridden and self.recipe.parallel.engine in ("auto", engine),
            )
        if gpu != "cpu" and self._is_on("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
            yield self._stated(
                "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
                "training.precision",
                OneOf(("bf16", "fp16")),
                winner="environment",
                advice="unset it: products of fp32 matrices would have ten bits",
                breaks=True,
            )

    def _deterministic(self) -> Iterator[Stated]:
        """Values that `training.deterministic` cannot have; launchers keep the user's own."""
        if self.recipe.cluster.gpu == "cpu":
            return
        for name in deterministic.unsuitable(self.environ):
            yield self._stated(
                name,
                "training.deterministic",
                OneOf((False,)),
                winner="environment",
                advice=f"unset {name}, or set it to {deterministic.VARIABLES[name][0]}",
                breaks=True,
            )

    def _wandb(self) -> Iterator[Stated]:
        wandb = self.recipe.logging.wandb
        if wandb is None:
            return
        for name, key in _WANDB.items():
            if name in self.environ:
                yield self._stated(name, key, self.environ[name])
        if "WANDB_ENTITY" in self.environ:
            # W&B reads settings that the recipe does not make from here.
            entity = OneOf((self.environ["WANDB_ENTITY"], None))
            yield self._stated("WANDB_ENTITY", "logging.wandb.entity", entity)
        if self._is_on("WANDB_DISABLED"):
            yield self._stated("WANDB_DISABLED", "logging.wandb", False)

    def _others(self) -> Iterator[Stated]:
        if "DMT_CACHE" in self.environ:
            folder = OneOf((self.environ["DMT_CACHE"], None))
            yield self._stated("DMT_CACHE", "data.cache", folder)
        advice = "only what is in the cache is found"
        for name in _OFFLINE:
            if not self._is_on(name):
                continue
            for key in self._from_hub(name):
                yield self._stated(name, key, None, advice=advice, certain=False)

    def _from_hub(self, name: str) -> Iterator[str]:
        """What the recipe takes from the Hugging Face hub, as far as `name` concerns it."""
        model, data = self.recipe.model, self.recipe.data
        if name != "HF_DATASETS_OFFLINE":
            hub = model.hub if model.init == "pretrained" or model.config is None else None
            if hub is not None and not Path(hub).exists():
                yield "model.hub"
            if data.tokenizer != "bytes" and not Path(data.tokenizer).exists():
                yield "data.tokenizer"
        if name != "TRANSFORMERS_OFFLINE":
            for key, source in data.named_sources:
                if isinstance(source, RowsSource) and not Path(source.path).exists():
                    yield f"{key}.path"
