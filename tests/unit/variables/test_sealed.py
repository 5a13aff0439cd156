"""What was shown to be the same on all ranks cannot be written through, however it is seen."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.arrays import seal
from mpistrat.testing import run_ranks

pytestmark = pytest.mark.usefixtures("kept")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ctx = ms.get_replica_context
# Small and large, without dimensions, without elements, and of a dtype that has no buffer.
VALUES = [
    np.float64(1.5),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.zeros((0, 2), np.int8),
    np.ones((2, 40_000), np.complex64),
    np.ones((2, 2), BFLOAT16),
]


def assert_sealed(array):
    assert isinstance(array, np.ndarray | np.generic)  # a NumPy number never changes
    while isinstance(array, np.ndarray):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        array = array.base
    assert array is None or memoryview(array).readonly


def arrays_of(value):
    """Every way to an array that variables and mirrored values have in common."""
    asked = [np.asarray(value), np.asarray(value)[...], *value.values]
    return [*asked, value[1:], next(iter(value))] if np.size(value) > 1 else asked


def attributes_of(mirrored):
    return [mirrored.local, mirrored.T, mirrored.view(), mirrored.reshape(-1)]


def seen_of(strategy, value):
    return [*arrays_of(value), *strategy.experimental_local_results(value)]


def passed(strategy, value):
    """What functions that the library calls are given."""
    given = []
    strategy.run(given.append, args=(value,))
    strategy.run(lambda: ctx().merge_call(lambda s, x: given.append(x), args=(value,)))
    return [one.local if isinstance(one, ms.DistributedValues) else one for one in given]


@every("size", [1, 2, 3, 4])
@every("value", VALUES)
def test_variables(value, size):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(value)
            own = ms.Variable(value, synchronization=ms.VariableSynchronization.ON_READ)
        arrays = [v._component(), v.handle, np.array(v, copy=False)]
        arrays += [np.asarray(x) for x in (*seen_of(strategy, v), *passed(strategy, v))]
        strategy.run(lambda: arrays.extend([own.handle, np.asarray(own), own[...]]))
        strategy.extended.update(v, lambda var: arrays.append(np.asarray(var)))
        for array in arrays:
            assert_sealed(array)
        assert strategy.extended.value_container(arrays[0]) is v
        zero = np.zeros_like(value)
        assert v.assign(zero).numpy().tobytes() == zero.tobytes()

    run_ranks(rank, size)


@pytest.mark.parametrize("shape", [(2, 3), (2, 40_000)])
def test_parts_of_a_variable_are_those_of_the_moment(shape):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(np.zeros(shape))
            own = ms.Variable(np.zeros(shape), synchronization=ms.VariableSynchronization.ON_READ)

        def parts(variable):
            keys = (0, slice(1), ..., np.newaxis, (slice(None), 1), [0, 1], np.ones(2, bool))
            return [*(variable[key] for key in keys), variable[0, 1], *variable]

        before = parts(v)
        v.assign(np.ones(shape))
        assert not any(map(np.any, before)) and all(map(np.all, parts(v)))

        def fn():
            before = [*parts(own), *(np.ones(1) - row for row in parts(v))]
            own.assign(np.ones(shape))
            v.assign_add(np.ones(shape))
            return not any(map(np.any, before))

        assert strategy.run(fn).local

    run_ranks(rank, 2)


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # of NumPy 2.5
@every("size", [1, 2, 3, 4])
@every("value", VALUES)
def test_mirrored_values(value, size):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(value)
        extended, array = strategy.extended, np.array(value)
        op = "mean" if array.dtype.kind in "fc" else "max"
        per_replica = strategy.run(lambda: array.copy())
        made = [
            extended.reduce_to("sum", per_replica, v),
            *extended.batch_reduce_to(op, [(per_replica, v)] * 2),
            extended.broadcast_to(array, v),
            extended.update(v, lambda var, x: np.array(x), args=(array,)),
        ]
        for mirrored in made:
            assert isinstance(mirrored, ms.Mirrored)
            arrays = [*seen_of(strategy, mirrored), *attributes_of(mirrored)]
            arrays += passed(strategy, mirrored)
            extended.update(v, lambda var, x: arrays.append(x), args=(mirrored,))  # noqa: B023
            for one in arrays:
                assert_sealed(one)
        np.asarray(made[0]).shape = (-1,)  # of the program's own view
        assert made[0].shape == array.shape
        total = np.sum([array] * comm.size, axis=0, dtype=array.dtype)
        assert v.assign(made[0]).numpy().tobytes() == total.tobytes()

    run_ranks(rank, size)


@every("code", [*"?bBhHiIlLefdgFDG", BFLOAT16, ">f8"])
def test_every_layout_of_every_dtype_can_be_sealed(code):
    whole = np.arange(24).reshape(4, 6).astype(code)
    for array in (whole, whole.T, whole[::2, ::-1], whole[:0], whole[1:2, 0].reshape(())):
        view = seal(array)
        assert (view.dtype, view.shape) == (array.dtype, array.shape)
        assert view.tolist() == array.tolist()
        assert np.shares_memory(view, array) == (array.size > 0)
        assert_sealed(view)


@pytest.mark.parametrize("function", [np.add, np.subtract, np.maximum])
def test_functions_at_some_places_do_not_write_to_a_variable(function):
    v = ms.Variable(np.zeros(3), name="table")
    with pytest.raises(TypeError, match=rf"'table:0' is a variable; np.{function.__name__}.at"):
        function.at(v, [0, 1], 1.0)
    assert v.numpy().tolist() == [0.0, 0.0, 0.0]


@every("dtype", [">g", ">G"])
@every("shape", [(), (0, 2), (3, 2)])
def test_what_update_returns_of_another_byte_order(dtype, shape):
    array = np.ones(shape, dtype).T

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(0.0)
        extended = strategy.extended
        made = [
            extended.update(v, lambda var: array),
            extended.update_non_slot(extended.non_slot_devices([v]), lambda: array),
        ]
        for value in made:
            assert_sealed(value.local)
            assert value.local.dtype == array.dtype
            assert value.local.tobytes() == array.tobytes()
            assert value.local.shape == array.shape

    run_ranks(rank, 2)


@every("dtype", ["M8[s]", [("day", "M8[D]"), ("x", ">G")], ml_dtypes.float8_e4m3fn, BFLOAT16])
@every("shape", [(), (0, 2), (3, 2)])
def test_dtypes_without_a_buffer(dtype, shape):
    array = np.zeros(shape, "i1").astype(dtype).T
    seen = seal(array)
    assert_sealed(seen)
    assert (seen.dtype, seen.shape) == (array.dtype, array.shape)
    assert not array.size or np.shares_memory(seen, array)
    assert seen.tobytes() == array.tobytes()
    day = np.datetime64("2020-01-02")
    assert np.asarray(ms.Mirrored(day)) == day


def test_numpy_at_writes_to_what_is_read_only_and_is_refused():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(np.zeros(3))
        m = strategy.extended.reduce_to("SUM", strategy.run(lambda: np.ones(3)), v)
        for value in (v, m):
            before = np.array(value)
            with pytest.raises(TypeError, match=r"write|written"):
                np.add.at(value, [comm.rank], 5.0)
            np.testing.assert_array_equal(value, before)
        place = np.zeros(3)
        np.add.at(place, [0, 0], m[:2])  # from one is reading
        return place.tolist()

    assert run_ranks(rank, 2) == [[4.0, 0.0, 0.0]] * 2
