"""The `hf` model implementation: transformers models, built, filled and measured."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import initialization as hf_initialization
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.batch import MicroBatch
from toolkit.errors import DataError, PlanError
from toolkit.layout import (
    ExpertProducts,
    LossKernel,
    Recompute,
    loss_chunks,
    recomputed_layers,
)
from toolkit.models import documents, liger
from toolkit.models.context import Context
from toolkit.models.families import model_spec
from toolkit.models.families.arguments import rope_type_of
from toolkit.models.hub import asks_to_run_code, runs_code
from toolkit.models.log_probs import in_chunks, label_log_probs
from toolkit.models.model import is_dropout, read
from toolkit.models.pretrained import SafetensorsWeights
from toolkit.models.spec import ModelSpec
from toolkit.models.weights import (
    RandomWeights,
    WeightSource,
    checkpoint_names,
    correction_biases,
    shapes_of,
    weight_name,
)
from toolkit.recipe.schema import ModelSection
from toolkit.system.untrusted import read_json

CONFIG = "config.json"
GENERATION = "generation_config.json"
EXPERTS: Mapping[ExpertProducts, str] = {"sequential": "eager", "grouped": "grouped_mm"}
"""transformers' names of what `kernels.experts` chooses."""
MODEL_FILES = (CONFIG, GENERATION)
"""What describes a model in a Hugging Face folder."""
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template.*", "*.model",
)  # fmt: skip


def snapshot_folder(hub: str, revision: str | None) -> Path:
    """The local folder of a hub id, downloading config and safetensors when needed."""
    if Path(hub).is_dir():
        return Path(hub)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(hub, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise DataError(
            f"model.hub: {hub!r} is neither a local folder nor reachable on the hub "
            f"({type(error).__name__})",
            fix="check the name, log in with `hf auth login`, or point at a local folder",
        ) from error


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a Hugging Face folder, without running its code.

    Raises DataError if it has none, or one that transformers does not know.
    """
    try:
        read_json(folder / CONFIG)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a strict config class may raise any exception
        if asks_to_run_code(error):
            raise runs_code(f"the model in {folder}") from error
        raise DataError(
            f"{folder / 'config.json'} cannot be used: {error}",
            fix="name a folder with the config of a model that transformers knows",
        ) from error
    config._attn_implementation = "eager"  # until a plan decides: tools publish another
    return config


def build_config(model: ModelSection) -> PretrainedConfig:
    """The transformers config: the recipe's keys, checked against the hub's when loaded.

    Raises PlanError when the recipe and the checkpoint state different values.
    """
    stated = deepcopy(model.config or {})  # transformers writes into nested maps
    if model.init == "pretrained" or not stated:
        assert model.hub is not None, "checked at load"
        config = read_config(snapshot_folder(model.hub, model.revision))
        if stated:
            _compare(stated, config, model.hub)
    else:
        config = AutoConfig.for_model(**stated)
    for key in filter(is_dropout, config.to_dict()):
        if key not in stated:
            setattr(config, key, 0.0)
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            "model.config.output_router_logits: transformers' balancing loss depends on the "
            "micro batches, and is not trained",
            fix="remove it and set model.balance: {kind: sequence_loss, coefficient: 0.001}",
        )
    config._experts_implementation = EXPERTS["sequential"]  # until a plan decides
    return config


def _is_unplanned(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a recipe with this `config` may set a key differently from the pretrained model:
    the number of positions only where nothing is computed from it."""
    if key == "max_position_embeddings":
        rope = rope_type_of(read(config).config)
        return rope == "default" and not model_spec(config).learned_positions
    return key == "use_cache" or is_dropout(key)


_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
"""Old and new spellings of what transformers keeps as `rope_parameters`."""


def _compare(stated: Mapping[str, Any], config: PretrainedConfig, hub: str) -> None:
    """Refuse a recipe whose config, which was used for planning, differs from the
    checkpoint's."""
    planned = AutoConfig.for_model(**stated)
    for key, value in stated.items():
        if _is_unplanned(key, stated):
            setattr(config, key, value)
            continue
        name = "rope_parameters" if key in _ROPE_KEYS else key
        ours, found = (getattr(one, name, None) for one in (planned, config))
        if ours != found:
            stated_value = ours if name == key else f"{name} {ours}"
            raise PlanError(
                f"model.config.{key}: the recipe has {stated_value}, {hub} has {found}",
                fix=f"set it to the value in {hub}'s config.json; to train another one, name a "
                "copy of its folder with an edited config.json in model.hub",
            )
    ours, found = (model_spec(one.to_dict()) for one in (planned, config))
    for field in fields(ModelSpec):
        a, b = getattr(ours, field.name), getattr(found, field.name)
        if a != b:
            raise PlanError(
                f"model.config: planned with {field.name} = {a!r}, which is transformers' "
                f"default, but {hub} has {b!r}",
                fix=f"state what {hub}'s config.json says of it in model.config",
            )


def new_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that `config` describes, on the current default device."""
    documents.register()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False
    )
    return model


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model without storage: shapes and names only."""
    with torch.device("meta"):
        return new_model(config, torch.float32)


def empty_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model on `device`, its buffers computed, its parameters not yet filled."""
    with hf_initialization.no_init_weights(), device:
        model = new_model(config, dtype)
    model.tie_weights()
    return model


def restore_buffers(
    model: nn.Module, config: PretrainedConfig, device: torch.device | None = None
) -> None:
    """Set every buffer (rotary frequencies) to its fp32 value, on `device` or its current one.

    DeepSpeed casts buffers to bf16 together with the parameters, which distorts the positions.
    A model created on the meta device has none.
    """
    reference = _computed_buffers(config)
    for name, buffer in model.named_buffers():
        buffer.data = reference[name].to(device or buffer.device)


def _computed_buffers(config: PretrainedConfig) -> dict[str, Tensor]:
    with init_empty_weights(include_buffers=False):
        return dict(new_model(config, torch.float32).named_buffers())


def weight_source(model: ModelSection, config: PretrainedConfig, seed: int) -> WeightSource:
    """Random or pretrained initial weights, as the recipe says."""
    if model.init == "random":
        return RandomWeights(meta_model(config), seed)
    assert model.hub is not None, "checked at load"
    return pretrained_weights(snapshot_folder(model.hub, model.revision), config)


def pretrained_weights(folder: Path, config: PretrainedConfig) -> SafetensorsWeights:
    """The weights of the model of `config` in a Hugging Face folder."""
    weights = SafetensorsWeights(folder, meta_model(config), lambda: _computed_buffers(config))
    if not dist.is_initialized() or dist.get_rank() == 0:
        weights.check_tied()  # reads both: once per run
    return weights


_OF_PEFT = re.compile(r"\.base_layer(?=\.)|(?<=\.lora_[AB])\.default(?=\.)")
"""Components that PEFT's layers add to parameter names: around the layer with an adapter, and
between an adapter's two tensors and its name."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter by its name in weights and checkpoints, with and without PEFT's layers:
    `….q_proj.weight` and, of its adapter, `….q_proj.lora_A.weight`. Where PEFT has wrapped a
    parameter of a module, its adapter is named after the parameter, not after the wrapper."""
    of_wrapper = {
        name: f"{name}.{module.parameter_name}"
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name")
    }
    for name, parameter in model.named_parameters():
        wrapper, dot, factor = name.partition(".lora_")
        if dot and wrapper in of_wrapper:
            name = f"{of_wrapper[wrapper]}{dot}{factor}"
        shape = getattr(parameter, "ds_shape", parameter.shape)
        yield weight_name(model, _OF_PEFT.sub("", name), shape), parameter


def tensors_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, set[str]]]:
    """Every parameter with the checkpoint tensors that it is made of."""
    for name, parameter in named_parameters(model):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        yield parameter, {piece.name for piece in checkpoint_names(name, shape)}


@torch.no_grad()
def fill(model: nn.Module, weights: WeightSource) -> None:
    """Initialise every parameter and correction bias in place."""
    for name, parameter in named_parameters(model):
        values = weights.read(name, 0, parameter.numel())
        parameter.copy_(values.view_as(parameter))
    fill_biases(model, weights)


@torch.no_grad()
def fill_biases(model: nn.Module, weights: WeightSource) -> None:
    """Initialise the routers' correction biases, which every rank holds whole."""
    for name, bias in correction_biases(model).items():
        bias.copy_(weights.read(name, 0, bias.numel()))


def log_probs(model: nn.Module, batch: MicroBatch, context: Context | None = None) -> Tensor:
    """See `label_log_probs`: fp32 [micro_batch, sequence], on every rank of `context`, each of
    which computes some of the positions.

    Where neither a mask nor a cache is given, transformers isolates documents, with the window
    of each layer counted inside its document. No single mask would work for every model: layers
    with and without a window need different ones.
    """
    own = batch if context is None else context.part(batch)
    inputs: dict[str, Any] = {"input_ids": own.input_ids, "use_cache": False}
    if own.positions is not None:
        inputs["position_ids"] = own.positions
    trained = getattr(model, "module", model)  # of DeepSpeed
    with documents.of(batch, context):
        if getattr(trained, _IN_CHUNKS, False):
            found: Tensor = model(targets=own.labels, **inputs)
        else:
            found = label_log_probs(model(**inputs).logits, own.labels)
    return found if context is None else context.whole(found)


_IN_CHUNKS = "loss_in_chunks"


def chunk_loss(model: PreTrainedModel, kernel: LossKernel) -> None:
    """Make the model return log-probabilities instead of logits if it is called with `targets`,
    the labels: depending on `kernel`, by Liger's, or for a chunk of positions at a time.

    The logits are the model's own: its forward pass is repeated for the positions of a chunk
    with the decoder's output instead of the decoder. A model without an argument
    `logits_to_keep` always computes all of them: raises PlanError.
    """
    plain, body = model.forward, model.base_model_prefix
    if kernel == "whole":
        return
    setattr(model, _IN_CHUNKS, True)
    if kernel == "liger":
        model.forward = liger.fused_loss(model)
        return
    if "logits_to_keep" not in signature(plain).parameters or body not in model._modules:
        raise PlanError(
            f"kernels.loss: {type(model).__name__} makes all logits at once",
            fix="set it to whole",
        )
    vocabulary = model.config.get_text_config().vocab_size

    def forward(targets: Tensor | None = None, **inputs: Any) -> Any:
        if targets is None:
            return plain(**inputs)
        chunks = loss_chunks(kernel, targets.numel(), vocabulary)
        decoded = _Decoded(model._modules[body](**inputs))

        def compute(places: Tensor) -> Tensor:
            decoder, model._modules[body] = model._modules[body], decoded
            try:
                logits = plain(input_ids=inputs["input_ids"], logits_to_keep=places).logits
            finally:
                model._modules[body] = decoder
            return label_log_probs(logits, targets[:, places])

        return in_chunks(compute, targets.shape[1], chunks, targets.device)

    model.forward = forward


class _Decoded(nn.Module):
    """Placeholder for a decoder that has already run."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object, **__: object) -> object:
        return self._output


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in model order: what `enable_recompute` recomputes one at a time."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def enable_recompute(model: PreTrainedModel, recompute: Recompute) -> None:
    """Recompute decoder layers' activations in the backward pass, one layer at a time."""
    if recompute == "none":
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    for layer in layers[recomputed_layers(recompute, len(layers)) :]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Training mode afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter and correction bias. Tied ones appear once."""
    return shapes_of(meta_model(config))


def checkpoint_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of the model. Tied ones appear once."""
    return {
        piece.name: piece.shape
        for name, shape in parameter_shapes(config).items()
        for piece in checkpoint_names(name, shape)
    }


def save_companions(
    config: PretrainedConfig,
    dtype: torch.dtype,
    folder: Path,
    base: Path | None = None,
    stated: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of a Hugging Face folder except the weights.

    If training started from the model in `base`, they are its files. Only the dtype of the
    weights differs, and dropout, cache and the number of positions if the recipe's
    `model.config`, `stated`, sets them.
    """
    model = meta_model(config)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    if base is not None:
        _keep_files(base, stated or {}, folder)
    elif model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of the tokenizer in `source`. transformers would write other settings."""
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def write_chat_template(template: str, folder: Path) -> None:
    """Set `template` as the chat template of the tokenizer in `folder`."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = folder / "tokenizer_config.json"
    stated = read_json(config) if config.is_file() else {}
    if stated.pop("chat_template", None) is not None:
        config.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")


def add_end_tokens(folder: Path, tokens: Iterable[int]) -> list[int]:
    """Let generation with the model in `folder` also stop at `tokens`. Returns those at which
    it did not stop before."""
    config = folder / CONFIG, read_json(folder / CONFIG)
    file = folder / GENERATION
    generation = file, read_json(file) if file.is_file() else {}
    own = generation[1].get("eos_token_id", config[1].get("eos_token_id"))
    known = own if isinstance(own, list) else [] if own is None else [own]
    added = [token for token in tokens if token not in known]
    for path, stated in (config, generation) if added else ():
        stated["eos_token_id"] = [*known, *added]
        path.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    return added


def _keep_files(base: Path, stated: Mapping[str, Any], folder: Path) -> None:
    """Replace transformers' defaults by the values of the model in `base`."""
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config = read_json(base / CONFIG)
    old_name = "torch_dtype" in config and "dtype" not in config
    config["torch_dtype" if old_name else "dtype"] = written["dtype"]
    config["architectures"] = written["architectures"]
    config |= {key: value for key, value in stated.items() if _is_unplanned(key, stated)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
