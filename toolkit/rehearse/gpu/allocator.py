"""What PyTorch's caching allocator reserves on a GPU for a sequence of requests.

Its rules, of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`: a request is
rounded up to 512 bytes and gets the smallest free block that is large enough, of the blocks of
its stream and its pool (up to 1 MiB, and above). What is left of the block is split off; a freed
block is joined with its free neighbours. Where none is large enough, memory is reserved: a
segment of its own, or with `expandable_segments` pages at the end of the stream's only one.
Nothing is given back: that happens only when a GPU has no memory left.

Not modelled: `record_stream`, which delays the reuse of a block, memory pools of CUDA graphs,
and what kernels reserve inside.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
BLOCK = 512
"""Bytes that a request is rounded up to (`kMinBlockSize`)."""
SMALL = 1 * MIB
"""The largest request of the pool of small blocks, and what a large block is not split for."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Of small requests, and of large ones below 10 MiB; also the pages of expandable segments."""
LEAST_OF_ITS_OWN, ROUNDED_TO = 10 * MIB, 2 * MIB
"""From so many bytes on, a segment is as large as its request, rounded up to whole 2 MiB."""


def rounded(nbytes: int, unit: int = BLOCK) -> int:
    """Bytes in whole units."""
    return -(-nbytes // unit) * unit


@dataclass(eq=False)
class _Block:
    """A run of bytes of a segment, in use or free."""

    pool: "_Pool"
    size: int
    address: int
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


@dataclass
class _Pool:
    """Blocks of one stream, small or large ones."""

    small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    """By size, then by address."""
    last: _Block | None = None
    """The end of the expandable segment."""


class Allocator:
    """Blocks of one GPU; `reserved` are the bytes of its segments."""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, key: int, nbytes: int, stream: int = 0) -> None:
        """Give `nbytes` to `key`, which has none, on a stream."""
        size = rounded(nbytes)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = self._best_fit(pool, size) or self._reserve(pool, size)
        block.free = False
        left = block.size - size
        if left >= BLOCK if small or self.expandable else left > SMALL:
            self._split(block, size)
        self._used[key] = block

    def free(self, key: int) -> None:
        """Take back what `key` has."""
        block = self._used.pop(key)
        for near in (block.before, block.after):
            if near is not None and near.free:
                self._take(near)
                block = self._joined(*((near, block) if near is block.before else (block, near)))
        self._put(block)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough, the expandable segment's end last."""
        first = bisect_left(pool.free, size, key=lambda entry: entry[0])
        found = pool.free[first : first + 2]
        if not found:
            return None
        block = found[-1 if found[0][2] is pool.last else 0][2]
        self._take(block)
        return block

    def _reserve(self, pool: _Pool, size: int) -> _Block:
        """A new block, not smaller than `size`."""
        segment = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        wanted = segment if size < LEAST_OF_ITS_OWN else rounded(size, ROUNDED_TO)
        end = pool.last
        if self.expandable and end is not None and end.free:
            more = rounded(wanted - end.size, segment)
            self._take(end)
            end.size += more
            self.reserved += more
            return end
        nbytes = rounded(wanted, segment) if self.expandable else wanted
        address = self._next_address if end is None else end.address + end.size
        block = _Block(pool, nbytes, address, before=end)
        self.reserved += nbytes
        if end is not None:
            end.after = block
        if self.expandable:
            pool.last = block
            self._next_address += 0 if end is not None else 2**50  # each has room for a GPU's
        else:
            self._next_address += nbytes
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Shorten a block to `size`; the rest of it is free."""
        rest = _Block(block.pool, block.size - size, block.address + size, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        if block.pool.last is block:
            block.pool.last = rest
        self._put(rest)

    def _joined(self, first: _Block, second: _Block) -> _Block:
        """Two neighbours as one."""
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        if first.pool.last is second:
            first.pool.last = first
        return first

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        entries = block.pool.free
        del entries[bisect_left(entries, (block.size, block.address), key=lambda one: one[:2])]
