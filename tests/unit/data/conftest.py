"""Sources that watch how they are read."""

from __future__ import annotations

import numpy as np
import pytest


class Recorder:
    """An array that notes every row it is asked for, and can refuse index arrays."""

    def __init__(self, array, fancy=True):
        self.array = np.asarray(array)
        self.shape = self.array.shape
        self.dtype = self.array.dtype
        self.fancy = fancy
        self.keys = []
        self.refused = 0

    def __getitem__(self, key):
        if not isinstance(key, slice) and not self.fancy:
            self.refused += 1
            raise TypeError("only slices")
        self.keys.append(key)
        return self.array[key]

    @property
    def touched(self):
        """All rows read so far, as often as they were read."""
        rows = np.arange(len(self.array))
        return [int(row) for key in self.keys for row in np.atleast_1d(rows[key])]


@pytest.fixture
def recorder():
    return Recorder
