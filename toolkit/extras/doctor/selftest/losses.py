"""The rehearsal on this machine's own device: a tiny model in every engine against plain
transformers in fp32 on the CPU.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.extras.doctor.selftest.check import (
    ATTENTION_FILE,
    LIMIT_S,
    Check,
    CheckVerdict,
    Workplace,
)
from toolkit.intake.load import load_recipe
from toolkit.layout import Fp8Scaling, Precision
from toolkit.rehearse.comparison import TOLERANCE, Bounds, Record, read_record
from toolkit.rehearse.layouts import RehearsedLayout
from toolkit.rehearse.rehearsal import (
    LayoutResult,
    Options,
    Rehearsal,
    prepare,
    run_layout,
    run_reference,
)

WORKER = "toolkit.extras.doctor.selftest.rank"
SEQUENCE = 128
"""Tokens of a sequence: fused attention has kernels for it."""
BF16 = Bounds(5e-4, 2e-2)
"""Five to ten times the largest difference of any layout on a processor (docs/gpu.md)."""
FP8 = Bounds(1e-3, 5e-2)
"""The same with `kernels.fp8: rowwise`."""
UNMEASURED = 10.0
"""Up to so many times a bound, a difference on a GPU is no failure: those of 16 and 8 bits were
measured on processors only."""
_VERDICTS: Mapping[str, CheckVerdict] = {"skipped": "skipped", "diverged": "failed"}


@dataclass(frozen=True)
class Losses:
    """One model in one precision, in some layouts."""

    title: str
    recipe: Path
    layouts: tuple[RehearsedLayout, ...]
    precision: Precision = "fp32"
    fp8: Fp8Scaling | None = None

    @property
    def bounds(self) -> Bounds:
        """How far loss and gradient norm may be from the reference. In fp32 an H100 is as close
        to it as a processor: 2e-7 and 5e-7 (docs/gpu.md)."""
        if self.fp8 is not None:
            return FP8
        return TOLERANCE if self.precision == "fp32" else BF16

    def checks(self, place: Workplace) -> Iterator[Check]:
        """Train the reference and then every layout."""
        options = Options(
            processes=place.machine.processes,
            limit_s=LIMIT_S,
            worker=WORKER,
            gpu=place.machine.gpu,
        )
        folder = place.folder / self.title.replace(" ", "-")
        rehearsal = self._rehearsal(options)
        reference = self._reference(rehearsal, options, place.folder / self.recipe.stem)
        changes = {"training.precision": self.precision, "kernels.fp8": self.fp8}
        recipe = rehearsal.recipe.with_values(changes)
        bounds = self.bounds
        for layout in self.layouts:
            at = folder / layout.name
            result = run_layout(recipe, layout, reference, options, at, bounds)
            yield self._check(result, bounds, at, place)

    def _rehearsal(self, options: Options) -> Rehearsal:
        here = [f"cluster.gpus_per_node={options.processes}", f"cluster.gpu={options.gpu}"]
        rehearsal = prepare(load_recipe(self.recipe, here), options)
        recipe = rehearsal.recipe.with_values({"training.sequence_length": SEQUENCE})
        return replace(rehearsal, recipe=recipe)

    def _reference(self, rehearsal: Rehearsal, options: Options, folder: Path) -> Record:
        """Trained once for all precisions of a model."""
        known = read_record(folder)
        done = len(known.loss) == options.steps
        return known if done else run_reference(rehearsal, options, folder)

    def _check(self, result: LayoutResult, bounds: Bounds, at: Path, place: Workplace) -> Check:
        row = Check(
            self.title,
            result.candidate.name,
            _VERDICTS.get(result.verdict, "ok"),
            result.why,
            f"loss {bounds.loss:g}, norm {bounds.grad_norm:g}",
        )
        if result.failure is not None:
            log = str((at / "logs").relative_to(place.folder.parent))
            return replace(row, log=log, tail=result.failure.log)
        if result.comparison is None or result.plan is None:
            return row
        far, kernels = result.comparison, _kernels(at)
        times = max(far.max_rel_loss / bounds.loss, far.max_rel_grad_norm / bounds.grad_norm)
        if place.on_gpu and row.verdict == "failed" and times <= UNMEASURED:
            row = replace(row, verdict="measured")
        wanted = result.plan.attention_kernel
        text = f"loss {far.max_rel_loss:.0e}, norm {far.max_rel_grad_norm:.0e}, "
        text += f"attention {' + '.join(kernels) or 'without a fused kernel'}"
        text += f" (planned: {wanted})" * (wanted != "sdpa")
        numbers = {
            "max_rel_loss": far.max_rel_loss,
            "max_rel_grad_norm": far.max_rel_grad_norm,
            "attention": kernels,
            "planned_attention": wanted,
        }
        return replace(row, found=f"{row.found}; {text}".lstrip("; "), numbers=numbers)


def _kernels(folder: Path) -> list[str]:
    """The kernels of the layout that was rehearsed in `folder`, e.g. `flash`."""
    file = folder / ATTENTION_FILE
    found: list[str] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return found
