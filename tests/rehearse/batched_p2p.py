"""A rehearsal worker with a bug: pipeline stages talk through batched p2p.

With two stages and virtual stages, the previous rank is also the next one, and gloo
matches the batched messages in the wrong order: right losses, wrong gradients.
"""

from typing import Any

from toolkit.rehearse import small_run, worker


def build_engine(name: str, setup: Any) -> Any:
    """The engine, told to use megatron-core's default."""
    engine: Any = _build_engine(name, setup)
    config = engine.chunks[0].config  # the one that the schedule reads
    assert not config.batch_p2p_comm, "the product's own setting"
    config.batch_p2p_comm, config.overlap_p2p_comm = True, False
    return engine


if __name__ == "__main__":
    _build_engine = small_run.build_engine
    small_run.build_engine = build_engine
    worker.main()
