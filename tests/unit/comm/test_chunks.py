"""Cuts of what is too large for one call, without any MPI."""

from __future__ import annotations

from every import every

from mpistrat.comm.chunks import slices


@every("limit", [1, 7, 8, 64, 10**9])
@every("itemsize", [1, 3, 8, 16])
@every("size", [0, 1, 6, 7, 8, 50])
def test_slices_cover_everything_once_and_keep_to_the_limit(size, itemsize, limit):
    found = list(slices(size, itemsize, limit))
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(size))
    most = max(limit, itemsize)
    assert all(0 < (piece.stop - piece.start) * itemsize <= most for piece in found)
