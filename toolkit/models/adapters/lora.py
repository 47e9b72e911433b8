"""LoRA: which projections of a model get an adapter, and its tensors. Without torch.

A projection W [out, in] computes W·x + scaling · B·A·x, with A [rank, in] and B [out, rank]
(arXiv:2106.09685). There is one A and one B per projection of the transformers model,
regardless of what a model implementation fuses, so the function and the tensors equal PEFT's in
every layout. In a mixture of experts, attention alone has adapters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.errors import Problem, RecipeError
from toolkit.models import frozen
from toolkit.models.families import MegatronModel, mapped
from toolkit.models.families.tensors import Rows, Split, TensorMap, blocks
from toolkit.models.spec import AdapterParameters, ModelSpec
from toolkit.recipe.schema import AdapterSection
from toolkit.text.suggest import did_you_mean

KEY = "adapter.targets"
KINDS = ("all-linear", "attention", "mlp")
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's prefix for the wrapped model."""
BRANCH = "lora"
DOWN, UP = f"{BRANCH}.down", f"{BRANCH}.up"
"""A and B of one of megatron-core's layers: names of its parameters inside that layer."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of the transformers model."""

    name: str
    """The module's name, e.g. `model.layers.0.self_attn.q_proj`."""
    inputs: int
    outputs: int
    transposed: bool = False
    """The base stores [in, out]."""


@dataclass(frozen=True)
class Lora:
    """The adapters of one model."""

    section: AdapterSection
    tensors: tuple[TensorMap, ...]
    """Megatron's weights of which at least a part has an adapter."""
    targets: frozenset[str]
    """Modules with an adapter. `{layer}` stands for a number."""
    short_targets: tuple[str, ...]
    """`targets` for PEFT: the last parts of their names, if unambiguous."""
    base: MegatronModel
    projections: tuple[Projection, ...]

    @classmethod
    def of(cls, section: AdapterSection, config: Mapping[str, object]) -> "Lora":
        """The recipe's adapters, for a model with this Hugging Face `config`.

        Raises RecipeError if `adapter.targets` does not suit the model.
        """
        if found := [*problems(section, config)]:
            raise RecipeError(found)
        model = mapped(config)
        tensors = tuple(tensor for tensor in model.tensors if _chosen(section, tensor))
        chosen = frozenset(one for tensor in tensors for one in _chosen(section, tensor))
        every = {one for tensor in model.tensors for one in _modules(tensor)}
        short = {_last(one) for one in chosen}
        exact = {one for one in every if _last(one) in short} == chosen
        projections = tuple(_projections(model, chosen))
        return cls(
            section=section,
            tensors=tensors,
            targets=chosen,
            short_targets=tuple(sorted(short if exact else (p.name for p in projections))),
            base=model,
            projections=projections,
        )

    @property
    def transposed(self) -> bool:
        """The base stores [in, out] (GPT-2's Conv1D)."""
        return any(one.transposed for one in self.projections)

    @property
    def scaling(self) -> float:
        """The factor of B·A·x."""
        return self.section.alpha / self.section.rank

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the adapters, under PEFT's name without its `base_model.model.`."""
        found = dict[str, tuple[int, ...]]()
        rank = self.section.rank
        for one in self.projections:
            found[f"{one.name}.lora_A.weight"] = (rank, one.inputs)
            found[f"{one.name}.lora_B.weight"] = (one.outputs, rank)
        return found

    def projection(self, tensor: str) -> Projection | None:
        """The projection of a weight in the base's checkpoint. None without an adapter."""
        return self._by_name.get(tensor.removesuffix(".weight"))

    @cached_property
    def _by_name(self) -> dict[str, Projection]:
        return {one.name: one for one in self.projections}

    def adapted(self, model: MegatronModel) -> MegatronModel:
        """The model in megatron-core's terms, with the tensors of the adapters."""
        return replace(model, tensors=(*model.tensors, *self._added()))

    @property
    def parameters(self) -> AdapterParameters:
        """The size of the adapters."""
        split = whole = 0
        for tensor in self._added():
            elements = tensor.rows * (tensor.columns or 1) * self.base.copies(tensor)
            if tensor.split == "none":
                whole += elements
            else:
                split += elements
        return AdapterParameters(split=split, whole=whole)

    def parts(self, tensor: TensorMap) -> list[str]:
        """The modules with an adapter that a Megatron weight consists of, in its order."""
        return [one for one in _modules(tensor) if one in self.targets]

    def part_of_rows(self, tensor: TensorMap, rank: int, degree: int) -> list[int | None]:
        """For every row of a tensor-parallel rank's weight, the index of its module among
        `parts`. None if that has no adapter."""
        parts = self.parts(tensor)
        numbers = {f"{name}.weight".format(layer=0): i for i, name in enumerate(parts)}
        return [
            numbers.get(block.tensor)
            for block in blocks(tensor, rank, degree, layer=0)
            for _ in range(*block.rows)
        ]

    def _added(self) -> Iterator[TensorMap]:
        """A and B of every Megatron weight with an adapter.

        A stacks those of all parts, and is replicated if the weight's rows are split. B has the
        weight's rows, split in the same way, without those of parts without an adapter.
        """
        rank = self.section.rank
        for tensor in self.tensors:
            stem, parts = tensor.name.removesuffix("weight"), self.parts(tensor)
            down = tuple(Rows(f"{one}.lora_A.weight", 0, rank) for one in parts)
            split: Split = "columns" if tensor.split == "columns" else "none"
            yield TensorMap(f"{stem}{DOWN}", (down,), tensor.columns, split)
            stacks = [
                tuple(_of_factor(rows) for rows in stack if _module(rows) in parts)
                for stack in tensor.stacks
            ]
            split = "rows" if tensor.split == "rows" else "none"
            yield TensorMap(f"{stem}{UP}", tuple(filter(None, stacks)), rank, split)


def lora_of(section: AdapterSection | None, config: Mapping[str, object]) -> Lora | None:
    """`Lora.of`. None for a recipe without adapters."""
    return None if section is None else Lora.of(section, config)


def spec_of(
    config: Mapping[str, object], freeze: Sequence[str], section: AdapterSection | None
) -> ModelSpec:
    """The model's shape, with its frozen tensors and adapters."""
    spec, lora = frozen.spec_of(config, freeze), lora_of(section, config)
    return spec if lora is None else replace(spec, adapters=lora.parameters)


def trained_tensors(
    config: Mapping[str, object], freeze: Sequence[str], section: AdapterSection | None
) -> frozenset[str]:
    """The trained tensors: those of the adapters if there are any."""
    if lora := lora_of(section, config):
        return frozenset(lora.shapes)
    names = frozen.names_of(config)
    return names - frozen.matching(freeze, names)


def some_of_qkv(section: AdapterSection, config: Mapping[str, object]) -> bool:
    """Whether some, but not all, of the projections in megatron-core's `linear_qkv` have an
    adapter. Then B can be split like the weight only between key/value heads."""
    tensors = [tensor for tensor in mapped(config).tensors if ".linear_qkv." in tensor.name]
    return any(0 < len(_chosen(section, one)) < len(_modules(one)) for one in tensors)


def problems(section: AdapterSection, config: Mapping[str, object]) -> Iterator[Problem]:
    """What is wrong with `adapter.targets` for a model with this `config`."""
    tensors, place = mapped(config).tensors, "this model"
    kinds = [kind for kind in KINDS if any(_modules(t) and kind in _kinds(t) for t in tensors)]
    if any(".experts." in rows.tensor for t in tensors for stack in t.stacks for rows in stack):
        tensors, kinds = tuple(filter(_is_of_attention, tensors)), ["attention"]
        place = "the attention of this model, whose experts and MLPs have no adapters"
    every = sorted({_last(one) for tensor in tensors for one in _modules(tensor)})
    if idle := [name for name in _names(section) if name not in (*kinds, *every)]:
        found = f"{', '.join(idle)}, which is no projection of {place}"
        allowed = f"{', '.join(kinds)}, or some of {', '.join(every)}"
        nearest = [name for name in every if idle[0] in name] or every
        yield Problem(KEY, found, allowed, did_you_mean(idle[0], nearest, f"write {kinds[0]}"))


def _projections(model: MegatronModel, chosen: frozenset[str]) -> Iterator[Projection]:
    for instance in model.instances():
        tensor = instance.tensor
        for module in _modules(tensor):
            if module in chosen:
                assert tensor.columns is not None, "a matrix"
                outputs = sum(
                    len(rows.numbers)
                    for stack in tensor.stacks
                    for rows in stack
                    if _module(rows) == module
                )
                name = module.format(layer=instance.layer)
                yield Projection(name, tensor.columns, outputs, tensor.transposed)


def _chosen(section: AdapterSection, tensor: TensorMap) -> list[str]:
    """The modules of a Megatron tensor that the recipe gives an adapter."""
    kinds, names = _kinds(tensor), {*_names(section)}
    return [one for one in _modules(tensor) if kinds & names or _last(one) in names]


def _kinds(tensor: TensorMap) -> set[str]:
    """The kinds of projections that a Megatron tensor is of."""
    return {"all-linear", "attention" if _is_of_attention(tensor) else "mlp"}


def _is_of_attention(tensor: TensorMap) -> bool:
    return ".self_attention." in tensor.name


def _names(section: AdapterSection) -> tuple[str, ...]:
    """The kinds of projections and the projections that the recipe names."""
    return (section.targets,) if isinstance(section.targets, str) else section.targets


def _modules(tensor: TensorMap) -> list[str]:
    """The linear layers inside the decoder layers that a Megatron tensor consists of."""
    if tensor.columns is None or ".linear_" not in tensor.name:
        return []
    return list(dict.fromkeys(_module(rows) for stack in tensor.stacks for rows in stack))


def _of_factor(rows: Rows) -> Rows:
    """The rows of B that belong to these rows of the weight."""
    return replace(rows, tensor=f"{_module(rows)}.lora_B.weight")


def _module(rows: Rows) -> str:
    return rows.tensor.removesuffix(".weight")


def _last(module: str) -> str:
    return module.rpartition(".")[2]
