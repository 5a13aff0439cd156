"""State that is not a variable: replica 0's given to all, and a difference found."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat import pytree
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.strategy import shared_state
from mpistrat.testing import run_ranks

MANY = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]
SIZES = [1, 2, 3, 4]
DTYPES = [*"?bBhHilqQefdgFDG", ">i4", ">f8", ml_dtypes.bfloat16]


class Tensor:
    """What another library calls an array; NumPy gets a view of it, as of a CPU tensor of torch."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Copied(Tensor):
    """One of which NumPy gets a copy, as from a device."""

    def __array__(self, dtype=None, copy=None):
        return self.array.copy()


def arrays(rank):
    """Arrays of every dtype and layout; those of each rank are others."""
    tree = {str(dtype): np.full(5, rank + 1).astype(dtype) for dtype in DTYPES}
    plane = np.arange(12.0).reshape(3, 4) + 100 * rank
    return tree | {
        "0-d": np.array(rank + 0.5),
        "empty": np.zeros((0, 3)),
        "turned": plane.T,
        "steps": plane[::-2, ::3],
        "large": np.full((130, 90), rank, np.float64),
        "large turned": np.full((130, 90), rank, np.float64).T,
        "nest": [(np.int32([rank]),), []],
    }


def assert_bits(found, expected):
    """All the same, to the bit, except for the byte order."""
    ours, theirs = pytree.flatten(found), pytree.flatten(expected)
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype.name, a.shape) == (b.dtype.name, b.shape)
        native = [x.astype(x.dtype.newbyteorder("=")) for x in (a, b)]
        if a.dtype.char in "gG":  # whose bytes hold padding
            assert np.array_equal(*native)
        else:
            assert native[0].tobytes() == native[1].tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MANY)
def test_broadcast_gives_replica_0s_in_new_arrays(make, size):
    def rank(comm):
        strategy, mine = make(), arrays(comm.rank)
        found = strategy.broadcast(mine)
        assert_bits(found, arrays(0))
        assert_bits(mine, arrays(comm.rank))
        for new, old in zip(pytree.flatten(found)[0], pytree.flatten(mine)[0], strict=True):
            assert new.flags.carray
            assert not np.may_share_memory(new, old)
        strategy.check_same(found)

    run_ranks(rank, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 100], ids=["few", "many"])
def test_broadcast_of_numbers_keeps_them_numbers(size, count):
    def numbers(rank):
        one = {"int": 10**30 + rank, "bool": rank == 0, "float": rank - 0.5, "complex": 1j * rank}
        one |= {"none": None, "text": f"rank {rank}", "numpy": np.float32(rank), "0-d": np.ones(())}
        one["text of numpy"] = np.array([f"of {10**rank}"])[0]
        return [one] * count

    def rank(comm):
        return ms.MirroredStrategy().broadcast(numbers(comm.rank))

    for found in run_ranks(rank, size):
        assert found == numbers(0)
        for name, value in numbers(0)[0].items():
            assert type(found[-1][name]) is type(value)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MANY)
def test_broadcast_in_place(make, size):
    def rank(comm):
        strategy, mine = make(), arrays(comm.rank)
        kept = pytree.flatten(mine)[0]
        assert strategy.broadcast(mine, out=mine) is mine
        assert_bits(mine, arrays(0))
        assert all(a is b for a, b in zip(pytree.flatten(mine)[0], kept, strict=True))
        # To other arrays, in other layouts, and to what another library calls arrays.
        mine = {"x": np.full((2, 3), comm.rank), "y": Tensor(np.full(9000, 1.0 * comm.rank))}
        out = {"x": np.empty((3, 2), int).T, "y": Tensor(np.empty(18_000)[::2])}
        strategy.broadcast(mine, out=out)
        assert (out["x"] == 0).all()
        assert (out["y"].array == 0).all()
        assert (mine["x"] == comm.rank).all()
        strategy.broadcast(mine, out=mine)
        assert (mine["y"].array == 0).all()
        # Each other's places: all is read before anything is written.
        pair = [np.full(3, comm.rank + 1), np.full(3, comm.rank + 11)]
        strategy.broadcast(pair, out=pair[::-1])
        assert [x.tolist() for x in pair] == [[11] * 3, [1] * 3]

    run_ranks(rank, size)


def test_broadcast_costs_one_proof_and_one_broadcast(monkeypatch):
    sent = []
    real = LoopbackComm.bcast
    counted = lambda self, buffer, root: (sent.append(buffer.nbytes), real(self, buffer, root))  # noqa: E731
    monkeypatch.setattr(LoopbackComm, "bcast", counted)

    def rank(comm):
        strategy = ms.MirroredStrategy()
        before = strategy._replicas.lockstep.session.calls
        strategy.broadcast([np.ones(3, np.int8), 5, np.ones((2, 2)), np.ones(0), np.ones(())])
        large = np.ones(20_000)
        strategy.broadcast([large], out=[large])
        strategy.check_same([large, 5])
        # Before the ranks leave, which broadcasts too.
        return strategy._replicas.lockstep.session.calls - before, sorted(sent)

    assert run_ranks(rank, 2) == [(3, [3 + 32 + 8] * 2 + [160_000] * 2)] * 2


WRONG = {
    "a number": (ms.LeafTypeError, {"x": 1}, {"x": np.ones(1)}, "is a int"),
    "a copy": (
        ms.LeafTypeError,
        {"x": np.ones(2)},
        {"x": Copied(np.ones(2))},
        "copies of its memory",
    ),
    "another dtype": (ms.LeafTypeError, {"x": np.ones(2)}, {"x": np.ones(2, int)}, "float64"),
    "another shape": (ms.LeafTypeError, {"x": np.ones(2)}, {"x": np.ones(3)}, r"float64\[2\]"),
    "another tree": (ms.StructureError, {"x": np.ones(2)}, [np.ones(2)], "structure"),
    "read-only": (ValueError, {"x": np.ones(2)}, {"x": np.broadcast_to(1.0, 2)}, "read-only"),
    "masked": (ms.LeafTypeError, {"x": np.ones(2)}, {"x": np.ma.ones(2)}, "masked array"),
    "a value": (
        ms.LeafTypeError,
        {"x": np.ones(2)},
        {"x": ms.Mirrored(np.ones(2))},
        "array to write",
    ),
    "an object": (ms.LeafTypeError, {"x": object()}, None, "leaf 'x'"),
    "slices": (
        ms.LeafTypeError,
        {"x": ms.IndexedSlices(np.ones((1, 2)), [0])},
        None,
        "IndexedSlices",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_broadcast_on_one_rank_is_an_error_on_all(case):
    kind, tree, out, text = WRONG[case]

    def rank(comm):
        strategy = ms.MirroredStrategy()
        fine = {"x": np.ones(2)}
        with pytest.raises(kind, match=text):
            strategy.broadcast(*((tree, out) if comm.rank else (fine, fine)))
        with pytest.raises(ms.LockstepError, match=r"float64\[2\]"):
            strategy.broadcast({"x": np.ones(2 + comm.rank)})
        return strategy.broadcast(comm.rank)

    assert run_ranks(rank, 2) == [0, 0]


def test_broadcast_takes_components_and_follows_the_order_of_replicas():
    def rank(comm):
        topology = ms.Topology.read()
        order = ms.DeviceAssignment(topology, [2, 0, 1])
        strategy = ms.TPUStrategy(experimental_device_assignment=order)
        with strategy.scope():
            w = ms.Variable([1.0, 2.0])
        mine = strategy.run(lambda: np.full(2, comm.rank))
        strategy.check_same([w, ms.Mirrored(5)])
        with pytest.raises(ms.DivergenceError, match="0 on rank 0, 2 on rank 2"):
            strategy.check_same(mine)
        return strategy.broadcast([mine, w])

    for mine, w in run_ranks(rank, 3):
        assert mine.tolist() == [2, 2]
        assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MANY)
def test_equal_values_are_the_same_in_any_layout(make, size):
    def rank(comm):
        strategy = make()
        mine = arrays(0) | {"number": 3, "text": "x", "none": None, "nan": np.nan, "-0": -0.0}
        if comm.rank % 2:
            mine["turned"] = np.array(mine["turned"], order="C")
            mine[">i4"] = mine[">i4"].astype("<i4")
        long = np.zeros(3, np.longdouble)
        if long.itemsize == 16 and np.finfo(long.dtype).nmant == 63:
            long.view(np.uint8).reshape(3, 16)[:, 10:] = comm.rank  # padding, no part of a number
        assert strategy.check_same([mine, long]) is None

    run_ranks(rank, size)


def nan_of(bits):
    return np.array([0, 0x7FF8000000000000 + bits], np.uint64).view(np.float64)


DIFFERENT = {
    "an element": (
        lambda odd: {"a": np.ones(3), "w": np.where(np.arange(60).reshape(3, 4, 5) == 33, odd, 7)},
        r"leaf 'w' differs between ranks at index \(1, 2, 3\): 1 on rank {first}, 0 on rank 0",
    ),
    "0-d": (lambda odd: np.array(1.0 + odd), r"the value differs between ranks: 2.0 on rank"),
    "a number": (lambda odd: [1, 2 + odd], r"leaf '1' differs between ranks: 3 on rank {first}"),
    "text": (lambda odd: [f"a{odd}"], r"leaf '0' differs between ranks: 'a1' on rank {first}"),
    "numpy": (
        lambda odd: [np.str_(f"a{odd}")],
        r"leaf '0' differs .*: np.str_\('a1'\) on rank {first}",
    ),
    "a zero": (lambda odd: np.array([1, -0.0 if odd else 0.0]), r"at index \(1,\): -0.0 on rank"),
    "a nan": (
        nan_of,
        r"nan \(bits 7ff8000000000001\) on rank {first}, nan \(bits 7ff8000000000000",
    ),
    "bfloat16": (lambda odd: np.full(2, odd, ml_dtypes.bfloat16), r"at index \(0,\): 1.0 on rank"),
    "longdouble": (
        lambda odd: [np.longdouble(1) + odd * np.finfo(np.longdouble).eps],
        r"leaf '0' differs between ranks: 1.0",
    ),
    "leaves": (lambda odd: [odd, 1, odd], r"leaf '0' .* Of 3 leaves 2 differ"),
}


@every("size", SIZES[1:])
@every("case", DIFFERENT)
def test_a_difference_is_named_on_every_rank(case, size, monkeypatch):
    monkeypatch.setattr(shared_state, "_CHUNK_NBYTES", 64)  # several, of small arrays
    make, text = DIFFERENT[case]
    first = size // 2  # of two ranks or one that have the other value

    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        with pytest.raises(ms.DivergenceError, match=text.format(first=first)) as caught:
            strategy.check_same(make(int(comm.rank >= first)))
        with pytest.raises(ms.LockstepError):
            strategy.check_same(np.ones(1 + comm.rank))
        strategy.check_same(strategy.broadcast(make(comm.rank)))
        return str(caught.value).replace(f"this is rank {comm.rank} of", "")

    assert len(set(run_ranks(rank, size))) == 1


def test_one_replica_broadcasts_to_itself():
    strategy = ms.OneDeviceStrategy("cpu")
    mine = np.ones(2)
    found = strategy.broadcast({"x": mine, "n": 2})
    assert found["x"] is not mine
    assert found["n"] == 2
    assert strategy.broadcast(mine, out=mine) is mine
    strategy.check_same({"x": mine, "n": 2})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_text_travels_and_is_compared(size):
    """Also half a surrogate pair, as of a file name that is no UTF-8; in values and in names."""

    def rank(comm):
        s = ms.MirroredStrategy()
        tree = {"name\udcff": f"text\udcff{comm.rank}"}
        assert s.broadcast(tree) == {"name\udcff": "text\udcff0"}
        s.check_same({"name\udcff": "\udcff"})
        if size > 1:
            with pytest.raises(
                ms.DivergenceError, match=r"\n.* tree = strategy\.broadcast\(tree\)"
            ):
                s.check_same(tree)
            with pytest.raises(ms.LockstepError):
                s.broadcast({"\udcff" if comm.rank else "name": 1})

    run_ranks(rank, size)
