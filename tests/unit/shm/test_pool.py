"""Memory of large results is used again once nobody can see it, and not before."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.shm.segments import MIN_POOLED_NBYTES, ResultPool
from mpistrat.testing import run_ranks

SHAPE = (3, MIN_POOLED_NBYTES // 8)

pytestmark = pytest.mark.usefixtures("quick_collections")


def address(array):
    return array.__array_interface__["data"][0]


class Interface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


def by_torch(array):
    return pytest.importorskip("torch").from_numpy(array)


HOLDERS = {
    "a view": lambda x: x[1:, 5:],
    "a view of a view": lambda x: x.reshape(-1).view(np.int64)[7:],
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda x: memoryview(x)[1:],
    "a subclass": lambda x: x.view(np.recarray),
    "an iterator": lambda x: x.flat,
    "DLPack": lambda x: x.__dlpack__(),
    "a consumer of DLPack": np.from_dlpack,
    "ctypes": lambda x: x.ctypes,
    "a pointer": lambda x: x.ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
    "an array of ctypes": np.ctypeslib.as_ctypes,
    "a buffer of ctypes": lambda x: (ctypes.c_char * 8).from_buffer(x),
    "who has the interface": lambda x: np.asarray(Interface(x)),
    "torch": by_torch,
}


@pytest.mark.parametrize("how", HOLDERS)
def test_what_somebody_can_see_is_not_used_again(how):
    pool = ResultPool()
    result = pool.empty(SHAPE, np.dtype("f8"))
    result[...] = 1
    place = address(result)
    holder = HOLDERS[how](result)
    del result
    gc.collect()
    other = pool.empty(SHAPE, np.dtype("f8"))
    other[...] = 2
    assert not place <= address(other) < place + other.nbytes
    del holder
    gc.collect()
    assert address(pool.empty(SHAPE, np.dtype("f8"))) == place


def test_results_are_ordinary_arrays():
    for dtype in (np.dtype("f4"), np.dtype(ml_dtypes.bfloat16), np.dtype("c16")):
        found = ResultPool().empty((2, MIN_POOLED_NBYTES), dtype)
        assert type(found) is np.ndarray
        assert found.dtype == dtype and found.shape == (2, MIN_POOLED_NBYTES)
        assert found.flags.carray and found.flags.writeable
        found[...] = 3
        again = pickle.loads(pickle.dumps(found))
        assert (again == found).all()


def test_no_more_is_kept_than_was_in_use_at_once_and_not_for_long():
    pool, f8 = ResultPool(), np.dtype("f8")
    for size in (1, 2, 3, 4):  # one after the other
        pool.empty((size * MIN_POOLED_NBYTES,), f8)
    pool.turn()
    assert pool.waiting_nbytes == 4 * 8 * MIN_POOLED_NBYTES
    both = [pool.empty((MIN_POOLED_NBYTES,), f8) for _ in range(5)]
    assert pool.waiting_nbytes == 0
    del both
    pool.turn()
    assert pool.waiting_nbytes == 5 * 8 * MIN_POOLED_NBYTES
    for _ in range(40):
        pool.turn()
    assert pool.waiting_nbytes == 0


def test_a_result_may_be_dropped_by_another_thread():
    pool = ResultPool()
    given = [pool.empty(SHAPE, np.dtype("f8"))]
    place = address(given[0])
    thread = threading.Thread(target=given.clear)
    thread.start()
    thread.join()
    assert address(pool.empty(SHAPE, np.dtype("f8"))) == place


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_loop_of_fresh_results_takes_turns_in_two_places(n):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        x, seen = [np.full(SHAPE, comm.rank + 1.0), np.ones(5)], []

        def fn():
            places, first = set(), None
            for step in range(6):
                found = ms.get_replica_context().all_reduce("sum", x)
                first = found if first is None else first
                places.add(address(found[0]))
                assert (found[0] == n * (n + 1) / 2).all()
                found[0] += step  # the caller's own
            seen.extend([len(places), float(first[0][0, 0])])

        strategy.run(fn)
        return seen

    assert run_ranks(rank, n) == [[3, n * (n + 1) / 2]] * n  # and where the first still is
