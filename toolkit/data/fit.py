"""Packs items into rows with little padding."""

from bisect import bisect_left, insort

import numpy as np

from toolkit.data.rows import Int64Array


def pack(lengths: Int64Array, capacity: int) -> list[list[int]]:
    """Rows of whole items, at most `capacity` tokens each: numbers of items, ascending.

    `lengths` are the tokens of each item, from 1 to `capacity`. Best fit decreasing: from the
    longest to the shortest, each item is put into the fullest row that has room for it. The
    result depends on the lengths alone; rows are in the order of their first items.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Rows by the number of tokens that are left in them."""
    rooms: list[int] = []
    """The numbers of tokens that are left in some row, ascending."""
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        rows[row].append(item)
        left = room - length
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    return sorted(sorted(row) for row in rows)
