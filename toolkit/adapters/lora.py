"""LoRA: which projections of a model get an adapter, and its tensors. Without torch.

A projection W [out, in] computes W·x + scaling · B·A·x, with A [rank, in] and B [out, rank]
(arXiv:2106.09685). There is one A and one B per projection of the transformers model,
regardless of what a model implementation fuses, so the function and the tensors equal PEFT's in
every layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from toolkit.errors import Problem, RecipeError
from toolkit.models import frozen
from toolkit.models.families import MegatronModel, mapped
from toolkit.models.families.tensors import Rows, Split, TensorMap, blocks
from toolkit.models.spec import AdapterParameters, ModelSpec
from toolkit.recipe.schema import AdapterSection
from toolkit.text.suggest import did_you_mean

KEY = "adapter.targets"
BRANCH = "lora"
DOWN, UP = f"{BRANCH}.down", f"{BRANCH}.up"
"""A and B of one of megatron-core's layers: names of its parameters inside that layer."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of the transformers model."""

    name: str
    """Its module, e.g. `model.layers.0.self_attn.q_proj`."""
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Lora:
    """The adapters of one model."""

    section: AdapterSection
    tensors: tuple[TensorMap, ...]
    """Megatron's weights of which at least a part has an adapter."""
    targets: frozenset[str]
    """Modules with an adapter; `{layer}` stands for a number."""
    short_targets: tuple[str, ...]
    """The same for PEFT: the last parts of their names, if these are unambiguous."""
    transposed: bool
    """The base stores [in, out] (GPT-2's Conv1D)."""
    projections: tuple[Projection, ...]

    @classmethod
    def of(cls, section: AdapterSection, config: Mapping[str, object]) -> "Lora":
        """The recipe's adapters, for a model with this Hugging Face `config`.

        Raises RecipeError if `adapter.targets` does not suit the model.
        """
        if found := [*problems(section, config)]:
            raise RecipeError(found)
        model = mapped(config)
        chosen = [one for tensor in model.tensors for one in _chosen(section, tensor)]
        every = [one for tensor in model.tensors for one in _modules(tensor)]
        short = {_last(one) for one in chosen}
        exact = {one for one in every if _last(one) in short} == {*chosen}
        projections = tuple(_projections(model, frozenset(chosen)))
        tensors = tuple(tensor for tensor in model.tensors if _chosen(section, tensor))
        return cls(
            section=section,
            tensors=tensors,
            targets=frozenset(chosen),
            short_targets=tuple(sorted(short if exact else (p.name for p in projections))),
            transposed=any(one.transposed for one in tensors),
            projections=projections,
        )

    @property
    def scaling(self) -> float:
        """The factor of B·A·x (rslora: arXiv:2312.03732)."""
        rank = self.section.rank
        return self.section.alpha / (sqrt(rank) if self.section.rslora else rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the adapters, under PEFT's name without its `base_model.model.`."""
        rank, found = self.section.rank, dict[str, tuple[int, ...]]()
        for one in self.projections:
            found[f"{one.name}.lora_A.weight"] = (rank, one.inputs)
            found[f"{one.name}.lora_B.weight"] = (one.outputs, rank)
        return found

    def adapted(self, model: MegatronModel) -> MegatronModel:
        """The model in megatron-core's terms, with the tensors of the adapters."""
        return replace(model, tensors=(*model.tensors, *self._added()))

    @property
    def per_layer(self) -> AdapterParameters:
        """The size of the adapters of one layer."""
        split = {True: 0, False: 0}
        for tensor in self._added():
            split[tensor.split != "none"] += tensor.rows * (tensor.columns or 1)
        return AdapterParameters(split=split[True], whole=split[False])

    def parts(self, tensor: TensorMap) -> list[str]:
        """The modules with an adapter that a Megatron weight consists of, in its order."""
        return [one for one in _modules(tensor) if one in self.targets]

    def part_of_rows(self, tensor: TensorMap, rank: int, degree: int) -> list[int | None]:
        """For every row of a tensor-parallel rank's weight, the index of its module among
        `parts`; None if that has no adapter."""
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
                tuple(
                    replace(rows, tensor=f"{_module(rows)}.lora_B.weight")
                    for rows in stack
                    if _module(rows) in parts
                )
                for stack in tensor.stacks
            ]
            split = "rows" if tensor.split == "rows" else "none"
            yield TensorMap(f"{stem}{UP}", tuple(filter(None, stacks)), rank, split)


def lora_of(section: AdapterSection | None, config: Mapping[str, object]) -> Lora | None:
    """`Lora.of`; None for a recipe without adapters."""
    return None if section is None else Lora.of(section, config)


def spec_of(
    config: Mapping[str, object], freeze: Sequence[str], section: AdapterSection | None
) -> ModelSpec:
    """The model's shape, with its frozen tensors and adapters."""
    spec, lora = frozen.spec_of(config, freeze), lora_of(section, config)
    return spec if lora is None else replace(spec, adapters=lora.per_layer)


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
    tensors = mapped(config).tensors
    every = sorted({_last(one) for tensor in tensors for one in _modules(tensor)})
    if idle := [name for name in _named(section) if name not in every]:
        found = f"{', '.join(idle)}, which is no projection of this model"
        allowed = f"all-linear, attention, mlp, or some of {', '.join(every)}"
        yield Problem(KEY, found, allowed, did_you_mean(idle[0], every, f"write {every[0]}"))
    if any("{expert}" in one for tensor in tensors for one in _chosen(section, tensor)):
        yield Problem(
            KEY,
            f"{section.targets} of a model with experts, which cannot have adapters",
            "projections outside of experts",
            "set adapter.targets to attention",
        )


def _projections(model: MegatronModel, chosen: frozenset[str]) -> Iterator[Projection]:
    for instance in model.instances():
        for module in _modules(instance.tensor):
            if module in chosen:
                inputs = instance.tensor.columns
                assert inputs is not None, "a matrix"
                outputs = sum(
                    rows.stop - rows.start
                    for stack in instance.tensor.stacks
                    for rows in stack
                    if _module(rows) == module
                )
                yield Projection(module.format(layer=instance.layer), inputs, outputs)


def _chosen(section: AdapterSection, tensor: TensorMap) -> list[str]:
    """The modules of a Megatron tensor that the recipe gives an adapter."""
    kind = "attention" if ".self_attention." in tensor.name else "mlp"
    named = _named(section)
    wanted = not named and section.targets in ("all-linear", kind)
    return [one for one in _modules(tensor) if wanted or _last(one) in named]


def _named(section: AdapterSection) -> tuple[str, ...]:
    """The projections that the recipe names one by one."""
    return () if isinstance(section.targets, str) else section.targets


def _modules(tensor: TensorMap) -> list[str]:
    """The linear layers inside the decoder layers that a Megatron tensor consists of."""
    if tensor.columns is None or ".linear_" not in tensor.name:
        return []
    return list(dict.fromkeys(_module(rows) for stack in tensor.stacks for rows in stack))


def _module(rows: Rows) -> str:
    return rows.tensor.removesuffix(".weight")


def _last(module: str) -> str:
    return module.rpartition(".")[2]
