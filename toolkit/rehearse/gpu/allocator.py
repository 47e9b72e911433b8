"""What PyTorch's caching allocator reserves on a GPU for a sequence of requests.

Its rules, of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`: a request
is rounded up to 512 bytes and gets the smallest free block that is large enough, of the blocks
of its stream and its pool (up to 1 MiB, and above). What is left of the block is split off; a
freed block is joined with its free neighbours. Where none is large enough, memory is reserved:
a new segment, or with `expandable_segments` pages of the stream's only one, at the lowest
address that has room. What is free is given back only when a GPU has no memory left: segments
that are free as a whole, or pages.

Not modelled: `record_stream`, which delays the reuse of a block, pools of CUDA graphs, and what
kernels reserve inside.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
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
ENDLESS = 2**50
"""Addresses of an expandable segment."""

Request = tuple[int, int, int]
"""Bytes, below 0 where they are freed; whose they are; the stream, which freeing ignores."""


class OutOfMemory(Exception):
    """A request needs more than the limit."""


def rounded(nbytes: int, unit: int = BLOCK) -> int:
    """Bytes in whole units."""
    return -(-nbytes // unit) * unit


@dataclass(eq=False)
class _Block:
    """Bytes of a segment that follow each other."""

    pool: "_Pool"
    size: int
    address: int
    whole: bool = True
    """All of its pages are reserved."""
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


@dataclass(eq=False)
class _Pool:
    """Blocks of one stream, small or large ones."""

    small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    """By size, then by address."""
    pages: set[int] = field(default_factory=set)
    """Of the expandable segment, those that are reserved."""

    @property
    def page(self) -> int:
        """Bytes of one, and of a small segment."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def put(self, block: _Block) -> None:
        """Let others have a block."""
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def take(self, block: _Block) -> _Block:
        """Take a free block out."""
        block.free = False
        key = block.size, block.address
        del self.free[bisect_left(self.free, key, key=lambda entry: entry[:2])]
        return block


class Allocator:
    """Blocks of a GPU."""

    def __init__(self, *, expandable: bool, limit: int | None = None) -> None:
        """`limit`: the bytes that may be reserved."""
        self.expandable = expandable
        self.limit = limit
        self.reserved = 0
        """Bytes of segments or pages."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._end = 0

    def allocate(self, key: int, nbytes: int, stream: int = 0) -> None:
        """Give `nbytes` to `key`, which has none, on a stream. Raises OutOfMemory."""
        size = rounded(nbytes)
        pool = self._pool(stream, small=size <= SMALL)
        block = self._found(pool, size)
        if block is None:
            self._give_back()
            block = self._found(pool, size)
        if block is None:
            raise OutOfMemory
        left = block.size - size
        if left >= BLOCK if pool.small or self.expandable else left > SMALL:
            self._split(block, size)
        self._used[key] = block

    def free(self, key: int) -> None:
        """Take back what `key` has."""
        block = self._used.pop(key)
        for near in (block.before, block.after):
            if near is not None and near.free:
                block.pool.take(near)
                block = _joined(near, block) if near is block.before else _joined(block, near)
        block.pool.put(block)

    def replay(self, requests: Iterable[Request]) -> int:
        """What is reserved after all of them. Raises OutOfMemory."""
        for nbytes, key, stream in requests:
            if nbytes > 0:
                self.allocate(key, nbytes, stream)
            else:
                self.free(key)
        return self.reserved

    def _pool(self, stream: int, *, small: bool) -> _Pool:
        if (stream, small) not in self._pools:
            pool = self._pools[stream, small] = _Pool(small)
            if self.expandable:
                pool.put(_Block(pool, ENDLESS, 0, whole=False))
        return self._pools[stream, small]

    def _found(self, pool: _Pool, size: int) -> _Block | None:
        """A block that is large enough: the smallest of those that are reserved, else the
        lowest that can be. None where the limit forbids it."""
        first = bisect_left(pool.free, size, key=lambda entry: entry[0])
        fitting = [block for _, _, block in pool.free[first:]]
        for block in fitting:
            if block.whole:
                return pool.take(block)
        if self.expandable:
            block = min(fitting, key=lambda one: one.address)
            stop = (block.address + size - 1) // pool.page + 1
            missing = set(range(block.address // pool.page, stop)) - pool.pages
            if not self._reserve(len(missing) * pool.page):
                return None
            pool.pages |= missing
            return pool.take(block)
        segment = rounded(size, ROUNDED_TO) if size >= LEAST_OF_ITS_OWN else pool.page
        if not self._reserve(segment):
            return None
        self._end += segment
        return _Block(pool, segment, self._end - segment)

    def _reserve(self, nbytes: int) -> bool:
        """Whether the limit lets that many more be reserved."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            return False
        self.reserved += nbytes
        return True

    def _give_back(self) -> None:
        """Segments that are free as a whole, or all pages without a block in use."""
        for pool in self._pools.values():
            before = len(pool.pages)
            for size, _, block in list(pool.free):
                if self.expandable:
                    first = rounded(block.address, pool.page) // pool.page
                    stop = (block.address + size) // pool.page
                    gone = {page for page in pool.pages if first <= page < stop}
                    pool.pages -= gone
                    block.whole = block.whole and not gone
                elif block.before is block.after is None:
                    self.reserved -= pool.take(block).size
            self.reserved -= (before - len(pool.pages)) * pool.page

    def _split(self, block: _Block, size: int) -> None:
        """Shorten a block to `size`; the rest of it is free."""
        pool, rest = block.pool, _Block(block.pool, block.size - size, block.address + size)
        rest.whole = block.whole
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.whole = size, True
        pool.put(rest)


def _joined(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.whole = first.whole and second.whole
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def least(requests: list[Request], most: int, *, expandable: bool, steps: int = 6) -> int:
    """The least memory, of at most `most` bytes, with which all requests are met."""
    held = peak = 0
    for nbytes, _, _ in requests:
        held += nbytes
        peak = max(peak, held)
    low, high = peak, most
    for _ in range(steps):
        middle = (low + high) // 2
        try:
            Allocator(expandable=expandable, limit=middle).replay(requests)
        except OutOfMemory:
            low = middle
        else:
            high = middle
    return high
