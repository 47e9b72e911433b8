"""How the global batches of a run are split over its data-parallel ranks."""

from dataclasses import replace

from toolkit.layout import Layout


class BatchSplit:
    """How the batches of steps are split over ranks: the plan's layout, until samples move."""

    def __init__(self, layout: Layout) -> None:
        self._steps = (layout, 0, layout)

    @property
    def layout(self) -> Layout:
        """The newest."""
        return self._steps[2]

    def at(self, step: int) -> Layout:
        """Split of the step with this index."""
        before, first, newest = self._steps
        return newest if step >= first else before

    def change(self, layout: Layout, first: int) -> None:
        """Split another way from step `first` on."""
        self._steps = (self.layout, first, layout)

    def resume(self, saved: Layout, unit: int) -> None:
        """Continue with the shares of a checkpoint, if they suit the plan's ranks and batch."""
        planned = self.layout
        suits = saved.dp == planned.dp and saved.global_batch == planned.global_batch
        if suits and unit % saved.round_samples == 0:
            self.change(with_shares(planned, saved.micro_batches), 0)


def with_shares(layout: Layout, shares: tuple[int, ...]) -> Layout:
    """The layout with these samples in the micro batch of each data-parallel rank, and the
    accumulation of the same global batch."""
    return replace(
        layout,
        shares=shares if len({*shares}) > 1 else (),
        micro_batch=max(shares),
        gradient_accumulation=layout.global_batch // sum(shares),
    )
