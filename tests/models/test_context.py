"""Attention of rows whose positions are spread over ranks: exchanges against products of whole
rows."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.forked import call_ranks
from tests.models.small import tiny
from toolkit.batch import MicroBatch
from toolkit.engines.distributed import Ranks
from toolkit.layout import Exchange, Layout
from toolkit.models import documents
from toolkit.models import huggingface as hf
from toolkit.models.context import Context
from toolkit.models.documents import Scores
from toolkit.models.log_probs import label_log_probs

ROWS, LENGTH, HEADS, SIZE = 2, 32, 4, 8
SEGMENTS = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
for _row, _begin in ((0, 3), (0, 13), (1, 16), (1, 30), (1, 31)):
    SEGMENTS[_row, _begin:] += 1
WORLD = 4
EXCHANGES: tuple[Exchange, ...] = ("all_gather", "ulysses")
CASES: Mapping[str, Mapping[str, Any]] = {
    "one document": {},
    "packed": {"packed": True, "groups": 1},
    "window": {"window": 5, "groups": 1},
    "packed, window": {"packed": True, "window": 9},
    "packed, sinks": {"packed": True, "sinks": True},
    "window, sinks": {"window": 11, "sinks": True, "groups": 1},
    "packed, capped": {"packed": True, "cap": 1.5},
    "window, capped, sinks": {"window": 7, "cap": 1.5, "sinks": True, "groups": 4},
}


def compare(ranks: Ranks) -> dict[str, float]:
    """The largest error of each case, by its name."""
    errors: dict[str, float] = {}
    for degree in (2, 4):
        layout = Layout(dp=WORLD // degree, cp=degree)
        batch = layout.data_rank(ranks.rank)
        for exchange in EXCHANGES:
            named = f"{exchange} cp{degree}"
            context = Context.of(replace(layout, exchange=exchange))
            for name, case in CASES.items():
                errors[f"{named}: {name}"] = attention_error(context, case, batch)
            errors[f"{named}: a closed group's name"] = names_again(layout, exchange)
            for family in ("llama", "gemma2", "gpt_oss")[: 3 if degree == 4 else 1]:
                errors[f"{named}: {family}"] = model_error(context, family, batch)
    return errors


def attention_error(context: Context, case: Mapping[str, Any], seed: int) -> float:
    """Of the output and all gradients, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    groups = case.get("groups", 2)
    shapes = [(heads, size) for heads, size in ((HEADS, SIZE), (groups, SIZE), (groups, 6))]
    whole = [random(ROWS, LENGTH, *shape).requires_grad_() for shape in shapes]
    sinks = [random(HEADS).requires_grad_()] if case.get("sinks") else []
    above = random(ROWS, LENGTH, HEADS, 6)
    segments = SEGMENTS if case.get("packed") else None
    window, cap = case.get("window"), case.get("cap")
    out = products(*whole, segments, window, cap, *sinks)
    gradients = torch.autograd.grad((out * above).sum(), whole + sinks)

    own = [context.own(x.detach()).requires_grad_() for x in whole]
    own_sinks = [x.detach().requires_grad_() for x in sinks]
    scores = Scores(None, window, cap, *own_sinks)
    own_out = context.attend(*own, ends_of(segments), scores)
    own_loss = (own_out * context.own(above)).sum()
    of_own, of_sinks = (lambda x: (x[:3], x[3:]))(
        torch.autograd.grad(own_loss, own + own_sinks)
    )
    for x in of_sinks:
        dist.all_reduce(x, group=context.group)
    expected = [out, *gradients[:3]]
    pairs = [*zip([own_out, *of_own], map(context.own, expected), strict=True)]
    pairs += zip(of_sinks, gradients[3:], strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of whole rows with a mask of rows and columns."""
    k, v = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    sees = (distance >= 0) & (distance <= (LENGTH if window is None else window))
    if segments is not None:
        sees = (sees & (segments[:, :, None] == segments[:, None]))[:, None]
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :LENGTH], v)


def ends_of(segments: Tensor | None) -> Tensor:
    if segments is None:
        return torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH
    ends = MicroBatch(segments, segments, segments=segments).ends
    assert ends is not None
    return ends


def names_again(layout: Layout, exchange: Exchange) -> float:
    """1 if a new group has the name of a closed one: its ranks would look for each other under
    addresses that no longer answer."""
    names = []
    for _ in range(2):
        context = Context.of(replace(layout, exchange=exchange))
        names.append(context.group.group_name)
        context.close()
    return float(names[0] == names[1])


def model_error(context: Context, family: str, seed: int) -> float:
    """Relative, of the log-probabilities and gradients of a small model of packed rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (2, ROWS, LENGTH), generator=generator)
    begins = torch.nn.functional.pad(SEGMENTS.diff(dim=1), (1, 0), value=1)
    places = torch.arange(LENGTH).expand(ROWS, -1)
    positions = places - (places * (begins > 0)).cummax(dim=1).values
    batch = MicroBatch(*tokens)
    if family != "gpt_oss":  # whose own masks know no documents
        batch = replace(batch, positions=positions, segments=SEGMENTS)
    weights = torch.rand(ROWS, LENGTH, generator=generator)

    def results(split: Context | None) -> list[Tensor]:
        config = hf.AutoConfig.for_model(**tiny(family) | {"sliding_window": 6})
        config._attn_implementation = "documents" if split else "eager"
        torch.manual_seed(seed)
        model = hf.new_model(config, torch.float32)
        part = split.part(batch) if split else batch
        with documents.of(batch, split):
            out = model(part.input_ids, position_ids=part.positions, use_cache=False)
        log_probs = label_log_probs(out.logits, part.labels)
        log_probs = split.whole(log_probs) if split else log_probs
        (log_probs * weights).sum().backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        for gradient in gradients if split else ():
            dist.all_reduce(gradient, group=context.group)
        return [log_probs.detach(), *gradients]

    pairs = zip(results(None), results(context), strict=True)
    return max(float((x - y).norm() / x.norm().clamp(min=1e-4)) for x, y in pairs)


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """The largest of all ranks."""
    of_ranks = call_ranks(compare, WORLD)
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_computes_what_whole_rows_do(
    exchange: str, degree: int, errors: dict[str, float]
) -> None:
    named = f"{exchange} cp{degree}: "
    mine = [name for name in errors if name.startswith(named)]
    found = {name.removeprefix(named): errors[name] for name in mine}
    assert found.keys() >= CASES.keys()
    wrong = {n: error for n, error in found.items() if error > (1e-12 if n in CASES else 1e-5)}
    assert not wrong
