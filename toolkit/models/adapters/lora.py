"""LoRA: which projections of a model get an adapter, and its tensors. Without torch.

A projection W [out, in] computes W·x + scaling · B·A·x, with A [rank, in] and B [out, rank]
(arXiv:2106.09685). There is one A and one B per projection of the transformers model,
regardless of what a model implementation fuses, so the function and the tensors equal PEFT's in
every layout.

transformers keeps the experts of a layer in one parameter [experts, out, in]. PEFT adapts it as
one (`target_parameters`): A [experts · rank, in] and B [out, rank · experts]. Expert e has
`rank` rows of A, from e · rank on, and the columns e, e + experts, … of B. Gate and up
projection of an expert are rows of one B and share an A.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from toolkit.errors import Problem, RecipeError
from toolkit.models import frozen
from toolkit.models.families import MegatronModel, mapped
from toolkit.models.families.tensors import Block, Rows, Split, TensorMap, blocks
from toolkit.models.spec import AdapterParameters, ModelSpec
from toolkit.recipe.schema import AdapterSection
from toolkit.text.suggest import did_you_mean

KEY = "adapter.targets"
KINDS = ("all-linear", "attention", "mlp", "experts")
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
    experts: int = 1
    """Experts in this parameter."""
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
    """`targets` for PEFT, without experts: the last parts of their names, if unambiguous."""
    parameter_targets: tuple[str, ...]
    """Targets among experts, for PEFT: the ends of their parameters' names."""
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
        of_experts = {m for t in tensors if is_of_expert(t) for m in _modules(t)}
        outside = [t for t in model.tensors if not is_of_expert(t)]
        every = {one for tensor in outside for one in _modules(tensor)}
        short = {_last(one) for one in chosen - of_experts}
        exact = {one for one in every if _last(one) in short} == chosen - of_experts
        projections = tuple(_projections(model, chosen))
        whole = (p.name for p in projections if p.experts == 1)
        ends = {module.partition("{layer}.")[2] for module in of_experts}
        return cls(
            section=section,
            tensors=tensors,
            targets=chosen,
            short_targets=tuple(sorted(short if exact else whole)),
            parameter_targets=tuple(sorted(ends)),
            base=model,
            projections=projections,
        )

    @property
    def transposed(self) -> bool:
        """The base stores [in, out] (GPT-2's Conv1D)."""
        return any(one.transposed for one in self.projections if one.experts == 1)

    @property
    def scaling(self) -> float:
        """The factor of B·A·x."""
        return self.section.alpha / self.section.rank

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the adapters, under PEFT's name without its `base_model.model.`."""
        found = dict[str, tuple[int, ...]]()
        for one in self.projections:
            rank = self.section.rank * one.experts
            found[f"{one.name}.lora_A.weight"] = (rank, one.inputs)
            found[f"{one.name}.lora_B.weight"] = (one.outputs, rank)
        return found

    @cached_property
    def peft_names(self) -> dict[str, str]:
        """The names of `shapes` in PEFT's files. PEFT wraps a layer's experts once per
        parameter, the first one innermost, and names each after its wrapper."""
        found, wrapped = dict[str, str](), dict[str, str]()
        for one in reversed(self.projections):
            module = one.name
            if one.experts > 1:
                owner = one.name.rpartition(".")[0]
                module = wrapped[owner] = (
                    f"{wrapped[owner]}.base_layer" if owner in wrapped else owner
                )
            for factor in "AB":
                own = f".lora_{factor}.weight"
                found[f"{one.name}{own}"] = f"{module}{own}"
        return {name: found[name] for name in self.shapes}

    def factors(self, tensor: str) -> tuple[Projection, Block, Block] | None:
        """Of a weight in the base's checkpoint: its projection, and the rectangles that are its
        A and its B. None without an adapter."""
        module, expert, part = tensor.removesuffix(".weight"), 0, ""
        if match := _OF_EXPERT.fullmatch(module):
            expert, part = int(match[2]), match[3]
            module = _stacked(module)
        one = self._by_name.get(module)
        if one is None:
            return None
        rank, half = self.section.rank, one.outputs // 2
        halves = {"gate_proj": (0, half), "up_proj": (half, one.outputs)}
        rows = halves.get(part, (0, one.outputs)) if one.experts > 1 else (0, one.outputs)
        columns = (expert, expert + (rank - 1) * one.experts + 1)
        down = Block(
            f"{module}.lora_A.weight",
            (expert * rank, (expert + 1) * rank),
            (0, one.inputs),
            transposed=False,
        )
        up = Block(f"{module}.lora_B.weight", rows, columns, False, (1, one.experts))
        return one, down, up

    @cached_property
    def _by_name(self) -> dict[str, Projection]:
        return {one.name: one for one in self.projections}

    def adapted(self, model: MegatronModel) -> MegatronModel:
        """The model in megatron-core's terms, with the tensors of the adapters."""
        return replace(model, tensors=(*model.tensors, *self._added()))

    @property
    def parameters(self) -> AdapterParameters:
        """The size of the adapters."""
        found = dict.fromkeys(product((False, True), repeat=2), 0)
        for tensor in self._added():
            elements = tensor.rows * (tensor.columns or 1) * self.base.copies(tensor)
            found[is_of_expert(tensor), tensor.split != "none"] += elements
        return AdapterParameters(
            split=found[False, True],
            whole=found[False, False],
            experts_split=found[True, True],
            experts_whole=found[True, False],
        )

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
            experts = self.base.transformer["num_moe_experts"] if is_of_expert(tensor) else 0
            down = tuple(Rows(f"{one}.lora_A.weight", 0, rank) for one in parts)
            split: Split = "columns" if tensor.split == "columns" else "none"
            yield TensorMap(f"{stem}{DOWN}", (down,), tensor.columns, split, experts=experts)
            stacks = [
                tuple(rows for rows in stack if _module(rows) in parts)
                for stack in _numbered(tensor.stacks)
            ]
            stacks = [tuple(map(_of_factor, stack)) for stack in stacks if stack]
            split = "rows" if tensor.split == "rows" else "none"
            yield TensorMap(
                f"{stem}{UP}",
                tuple(stacks),
                rank,
                split,
                experts=experts,
                interleaved=experts > 0,
            )


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
    tensors = mapped(config).tensors
    every = sorted({_last(one) for tensor in tensors for one in _modules(tensor)})
    chosen = {one: t for t in tensors for one in _chosen(section, t)}
    kinds = [kind for kind in KINDS if any(_modules(t) and kind in _kinds(t) for t in tensors)]
    if idle := [name for name in _names(section) if name not in (*kinds, *every)]:
        found = f"{', '.join(idle)}, which is no projection of this model"
        allowed = f"{', '.join(kinds)}, or some of {', '.join(every)}"
        nearest = [name for name in every if idle[0] in name] or every
        yield Problem(KEY, found, allowed, did_you_mean(idle[0], nearest, f"write {kinds[0]}"))
    family = str(config["model_type"])
    of_experts = any(map(is_of_expert, chosen.values()))
    if of_experts and mapped(config).transformer["num_moe_experts"] == 1:
        allowed = "projections outside of experts, of which each layer of this model has one"
        yield Problem(KEY, f"{section.targets}", allowed, f"set {KEY} to attention")
    elif of_experts and section.dropout:
        yield Problem(
            "adapter.dropout",
            f"{section.dropout:g} with adapters of experts",
            "0: PEFT adds B·A to the weights of experts, before there are inputs to drop",
            f"set adapter.dropout to 0, or {KEY} to attention",
        )
    outside = {_last(one) for one, tensor in chosen.items() if not is_of_expert(tensor)}
    mixture = any(".experts." in rows.tensor for t in tensors for s in t.stacks for rows in s)
    if mixture and family not in _KEPT_NAMES and (renamed := sorted(outside & _RENAMED)):
        yield Problem(
            KEY,
            f"{section.targets}, {', '.join(renamed)} outside of experts among them",
            f"attention, and experts: PEFT takes these names in {family} for those of experts",
            f"set {KEY} to [attention, experts]",
        )


def _projections(model: MegatronModel, chosen: frozenset[str]) -> Iterator[Projection]:
    for instance in model.instances():
        tensor = instance.tensor
        for module in _modules(tensor) if not instance.expert else ():
            if module in chosen:
                assert tensor.columns is not None, "a matrix"
                outputs = sum(
                    len(rows.numbers)
                    for stack in tensor.stacks
                    for rows in stack
                    if _module(rows) == module
                )
                experts = 1 if instance.expert is None else model.transformer["num_moe_experts"]
                name = module.format(layer=instance.layer)
                yield Projection(name, tensor.columns, outputs, experts, tensor.transposed)


def _chosen(section: AdapterSection, tensor: TensorMap) -> list[str]:
    """The modules of a Megatron tensor that the recipe gives an adapter."""
    kinds, names = _kinds(tensor), {*_names(section)}
    return [one for one in _modules(tensor) if kinds & names or _last(one) in names]


def _kinds(tensor: TensorMap) -> set[str]:
    """The kinds of projections that a Megatron tensor is of."""
    place = "attention" if ".self_attention." in tensor.name else "mlp"
    return {"all-linear", place, *(["experts"] * is_of_expert(tensor))}


def is_of_expert(tensor: TensorMap) -> bool:
    """Whether each expert of a layer has this tensor."""
    return "{expert}" in tensor.name


def _names(section: AdapterSection) -> tuple[str, ...]:
    """The kinds of projections and the projections that the recipe names."""
    return (section.targets,) if isinstance(section.targets, str) else section.targets


def _modules(tensor: TensorMap) -> list[str]:
    """The linear layers inside the decoder layers, or the parameter of all experts of a layer,
    that a Megatron tensor consists of."""
    if tensor.columns is None or ".linear_" not in tensor.name:
        return []
    return list(dict.fromkeys(_module(rows) for stack in tensor.stacks for rows in stack))


def _numbered(stacks: Sequence[Sequence[Rows]]) -> Iterator[list[Rows]]:
    """The rows with their numbers inside of their module: those of an expert's up projection
    follow those of its gate."""
    first, ends = dict[str, int](), dict[str, int]()
    for stack in stacks:
        for rows in stack:
            module = _module(rows)
            first.setdefault(rows.tensor, ends.get(module, 0))
            ends[module] = max(ends.get(module, 0), first[rows.tensor] + rows.stop)
    for stack in stacks:
        shifted = ((rows, first[rows.tensor]) for rows in stack)
        yield [replace(r, start=r.start + by, stop=r.stop + by) for r, by in shifted]


def _of_factor(rows: Rows) -> Rows:
    """The rows of B that belong to these rows of the weight."""
    return replace(rows, tensor=f"{_module(rows)}.lora_B.weight")


def _module(rows: Rows) -> str:
    return _stacked(rows.tensor.removesuffix(".weight"))


_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+|\{expert\})\.(\w+)")


def _stacked(module: str) -> str:
    """The parameter of all experts in which transformers keeps a module of one."""
    match = _OF_EXPERT.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}.{re.sub('^(gate|up)_proj$', 'gate_up_proj', match[3])}"


_RENAMED = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_KEPT_NAMES = ("gpt_oss", "llama4_text", "qwen2_moe")
"""In most mixtures PEFT takes the names of _RENAMED for experts', as transformers 4 had them
(`_convert_peft_config_moe`); not in these."""


def _last(module: str) -> str:
    return module.rpartition(".")[2]
