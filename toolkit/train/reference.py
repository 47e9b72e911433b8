"""The reference model's log-probabilities, which DPO reads: computed before the first step.

The reference is the model that training starts from. The run's own engine and layout compute
its log-probability of every row that the run will use, so no second model is ever in memory.
They are kept in the data cache under a hash of model and data, for every layout and every run
that uses both: another layout would compute slightly different values (about 1e-6).

A resumed run reads them there, although its weights are no longer the reference's. If they are
missing, an engine with the initial weights is built again to compute them.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from toolkit.checkpoint.checkpoints import locate
from toolkit.checkpoint.manifest import MANIFEST
from toolkit.data.batches import batches_of
from toolkit.data.build import TrainingData
from toolkit.data.files import cache_folder, fingerprint_of, write_cached
from toolkit.data.listing import content_fingerprint
from toolkit.data.rows import Int64Array, Row, Samples
from toolkit.engines.base import Engine
from toolkit.errors import CheckpointError, DataError, RunFailed
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.objectives.preference import REFERENCE
from toolkit.recipe.schema import Recipe
from toolkit.system.untrusted import parse_mapping, read_bytes
from toolkit.train.all_ranks import AllRanks
from toolkit.train.watchdog import Marks

Values = npt.NDArray[np.float32]
"""[samples, rows per sample]: log p of a row's trained tokens. NaN: not computed yet."""

SAVE_EVERY_S = 60.0
"""Seconds between saves: the most work that a kill loses."""
_FORMAT = 1
_NO_WEIGHTS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of a model's config that do not affect what it computes."""


class ReferenceTable(Samples):
    """Samples whose rows have the reference's log-probability in `extra`, once it is computed.
    What computes or reads the file is collective."""

    def __init__(
        self, samples: Samples, needed: Int64Array, path: Path, together: AllRanks
    ) -> None:
        """`needed`: the samples that the run uses, ascending. `path`: the file of rank 0."""
        self.sequence_length = samples.sequence_length
        self.rows_per_sample = samples.rows_per_sample
        self._samples = samples
        self._path = path
        self._together = together
        shape = len(samples), samples.rows_per_sample
        self._values: Values = together.rank_zero(lambda: _read(path, shape))
        self._needed = needed

    def __len__(self) -> int:
        return len(self._samples)

    def rows(self, index: int) -> Sequence[Row]:
        values = self._values[index].tolist()
        return [
            replace(row, extra={**row.extra, REFERENCE: value})
            for row, value in zip(self._samples.rows(index), values, strict=True)
        ]

    @property
    def missing(self) -> Int64Array:
        """The needed samples that are not computed yet."""
        return self._needed[~np.isfinite(self._values[self._needed]).all(axis=1)]

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        tick: Callable[[int], None],
        save_every_s: float = SAVE_EVERY_S,
    ) -> None:
        """Compute missing values by an engine with the reference's weights, and save them.

        Raises RunFailed if a log-probability is not finite.
        """
        missing = self.missing
        rank = self._together.ranks.rank
        saved = time.monotonic()
        batches = batches_of(
            self._samples,
            missing,
            layout.global_batch,
            layout.data_rank(rank),
            layout.micro_batches,
        )
        for number, micro_batches in enumerate(batches):
            found = _of_all_ranks(
                engine.sequence_log_probs(micro_batches), layout, self._together
            )
            first = number * layout.global_batch
            indices = missing[first : first + layout.global_batch]
            rows = found.view(-1, self.rows_per_sample)
            self._values[indices] = rows[: len(indices)].numpy()
            tick(len(indices))
            if rank == 0 and time.monotonic() - saved >= save_every_s:
                with suppress(DataError):  # raised on all ranks by the last one
                    _write(self._path, self._values)
                saved = time.monotonic()
        if len(missing):
            self._together.rank_zero(lambda: _write(self._path, self._values))
        if unusable := len(self.missing):
            raise RunFailed(
                f"the reference's log-probability of {unusable:,} samples is not finite",
                fix="train in bf16 or fp32, or remove these samples",
            )


def _of_all_ranks(mine: torch.Tensor, layout: Layout, together: AllRanks) -> torch.Tensor:
    """The rows of a global batch, from every data-parallel rank's share."""
    shares: list[tuple[int, torch.Tensor]] = [(0, mine)] * layout.world
    own = layout.data_rank(together.ranks.rank), mine
    dist.all_gather_object(shares, own, group=together.group)
    rows = dict(shares)
    return torch.cat([rows[share] for share in sorted(rows)])


def _read(path: Path, shape: tuple[int, int]) -> Values:
    try:
        found: Values = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        found = np.zeros(0, dtype=np.float32)
    if found.shape == shape and found.dtype == np.float32:
        return found
    return np.full(shape, np.nan, dtype=np.float32)


def _write(path: Path, values: Values) -> None:
    file = BytesIO()
    np.save(file, values)
    write_cached(path, file.getvalue())


def weights_fingerprint(recipe: Recipe, cache: Path) -> str:
    """Identifies the initial weights by all of their bytes: if only a few embeddings differ,
    which the samples of `toolkit.models.adapters.weights.fingerprint` may miss, the reference's
    log-probabilities differ, too.

    New adapters have no effect, because B is 0: with them, the reference is the base model.
    """
    model = recipe.model
    source: list[str | int] = [model.init]
    if model.init == "random":
        source.append(recipe.training.seed)
    elif model.init == "pretrained":
        assert model.hub is not None, "checked at load"
        folder = hf.snapshot_folder(model.hub, model.revision)
        source.append(content_fingerprint(sorted(folder.glob("*.safetensors")), cache))
    else:
        assert model.checkpoint is not None, "checked at load"
        source.append((locate(Path(model.checkpoint)).folder / MANIFEST).read_text())
    return fingerprint_of(source)


class RunReference:
    """The tables of a run: of its training data, and of its validation data."""

    def __init__(
        self,
        recipe: Recipe,
        config: PretrainedConfig,
        data: TrainingData,
        note: Path,
        together: AllRanks,
        *,
        steps: int,
        resumed: bool,
    ) -> None:
        """Look in the cache. Collective.

        `note` is a file of the run directory that records which weights the reference has: when
        a run resumes, the model that its recipe names may have changed or be missing.
        """
        self._recipe = recipe
        self._note = note
        self._cache = cache_folder()
        noted = together.rank_zero(lambda: _noted(note) if resumed else None)
        weights = noted or together.rank_zero(self._note_weights)
        computes = {k: str(v) for k, v in config.to_dict().items() if k not in _NO_WEIGHTS}
        key = [_FORMAT, weights, computes, data.whole_fingerprint, recipe.training.precision]

        def table(side: str, samples: Samples, needed: Int64Array) -> ReferenceTable:
            path = self._cache / "reference" / f"{fingerprint_of([*key, side])}.npy"
            return ReferenceTable(samples, needed, path, together)

        size = recipe.training.global_batch_size
        used = np.unique(data.order.indices(0, recipe.training.batches.samples(steps)))
        self.train = table("train", data.train, used)
        self.validation: dict[str, ReferenceTable] = {}
        """By title."""
        for number, (name, samples) in enumerate(data.validation.items()):
            count = min(recipe.evaluation.batches * size, len(samples))
            held_out = np.arange(count, dtype=np.int64)
            side = f"validation{number or ''}"
            self.validation[name] = table(side, samples, held_out)
        self._tables = [self.train, *self.validation.values()]

    def _note_weights(self) -> str:
        weights = weights_fingerprint(self._recipe, self._cache)
        write_cached(self._note, json.dumps({"weights": weights}))
        return weights

    @property
    def missing(self) -> int:
        """Number of samples that are not computed yet."""
        return sum(len(table.missing) for table in self._tables)

    def check_weights(self) -> None:
        """Raise CheckpointError if the initial model of a run is no longer available."""
        if _noted(self._note) != weights_fingerprint(self._recipe, self._cache):
            raise CheckpointError(
                f"the reference log-probabilities are no longer in {self._cache}, and the "
                "model that the run began with, by which they are computed, has changed",
                fix="restore one of them, or start in another directory (--run-dir OTHER)",
            )

    def compute(self, engine: Engine, layout: Layout, marks: Marks) -> None:
        """Compute missing values by an engine with the initial weights."""
        if missing := self.missing:
            tick = marks.begin("computing the reference's log-probabilities", missing)
            for table in self._tables:
                table.compute(engine, layout, tick)


def _noted(note: Path) -> str | None:
    try:
        return str(parse_mapping(read_bytes(note))["weights"])
    except (OSError, ValueError, KeyError):
        return None
