"""Cuts of what is too large for one call, without any MPI."""

from __future__ import annotations

import numpy as np
from every import every

from mpistrat.comm.mpi import cut_into_rounds, cut_into_slices


@every("limit", [1, 7, 8, 64, 10**9])
@every("itemsize", [1, 3, 8, 16])
@every("size", [0, 1, 6, 7, 8, 50])
def test_slices_cover_everything_once_and_keep_to_the_limit(size, itemsize, limit):
    found = list(cut_into_slices(size, itemsize, limit))
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(size))
    most = max(limit, itemsize)
    assert all(0 < (piece.stop - piece.start) * itemsize <= most for piece in found)


@every("limit", [1, 4, 7, 100])
@every("counts", [[5], [0], [0, 0, 0], [9, 0, 4], [0, 23], [1, 1, 1, 1], [3, 40, 0, 7]])
def test_rounds_put_every_byte_where_one_gather_would(counts, limit):
    sends = [np.arange(100 * r, 100 * r + n) for r, n in enumerate(counts)]
    out = np.full(sum(counts), -1)
    for step in cut_into_rounds(counts, limit):
        assert sum(step.counts) <= max(limit, len(counts))
        came = [
            send[step.begin : step.begin + n] for send, n in zip(sends, step.counts, strict=True)
        ]
        assert [part.size for part in came] == step.counts
        room = np.concatenate(came)
        for here, there in step.iterate_slices(counts):
            assert (out[there] == -1).all()
            out[there] = room[here]
    np.testing.assert_array_equal(out, np.concatenate(sends))


def test_rounds_of_thousands_of_millions_stay_within_the_room():
    counts = [2**33 + 1, 0, 5]
    steps = list(cut_into_rounds(counts, 2**30))
    assert [sum(step.counts[r] for step in steps) for r in range(3)] == counts
    assert max(sum(step.counts) for step in steps) <= 2**26
    *_, (came, goes) = steps[0].iterate_slices(counts)
    assert (came.stop - came.start, goes) == (5, slice(2**33 + 1, 2**33 + 6))
