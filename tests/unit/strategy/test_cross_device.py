"""Names of tf.distribute for how values move are the library's own way; a program's class moves."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat import pytree
from mpistrat.compat.v1 import distribute as v1
from mpistrat.testing import run_ranks

SIZES = [1, 2, 3, 4]
_METHODS = ("allgather", "allgatherv", "allreduce", "bcast", "gatherv", "sendrecv")


def record(comm, part="", into=None):
    """Note each call on `comm` as ``(part, method, bytes sent)``; handshakes are left out."""
    noted = [] if into is None else into
    for name in _METHODS:
        setattr(comm, name, _noting(noted, part, name, getattr(comm, name)))
    comm.split = _parts(noted, f"{part}/part", comm.split)
    return noted


def _noting(noted, part, name, method):
    def call(send, *args):
        if (name, send.nbytes) != ("allgather", 256):
            noted.append((part, name, send.nbytes))
        return method(send, *args)

    return call


def _parts(noted, part, split):
    def call(*args):
        made = split(*args)
        record(made, part, noted)
        return made

    return call


def moved(noted):
    """Return the names of the calls, with their parts."""
    return [f"{part}{'.' if part else ''}{name}" for part, name, _ in noted]


def choices():
    """Return one of each, made again for every test: the ranks share them, as constants are."""
    return {
        "native": lambda: ms.NcclAllReduce(),
        "nodes of two": lambda: ms.HierarchicalCopyAllReduce(2, ranks_per_node=2),
        "root": lambda: ms.ReductionToOneDevice("/cpu:0"),
        "function": lambda: ms.ReductionToOneDevice(accumulation_fn=lambda values: sum(values)),
    }


def made(name, size):
    return choices()[name]()


def ctx():
    return ms.get_replica_context()


def values(rank):
    """Return a tree of one replica: several dtypes, sizes, an empty leaf, a number."""
    rng = np.random.default_rng(rank)
    return {
        "a": rng.normal(size=(7, 11)),
        "b": rng.integers(-9, 9, 5).astype(np.int32),
        "c": [np.zeros((0, 3)), rng.normal(size=3).astype(np.float16)],
        "d": np.float32(rank + 1),
        "e": rng.normal(size=2000).astype(np.float32),
        "f": rng.normal(size=3) + 1j * rng.normal(size=3),
    }


def leaves(tree):
    return [np.asarray(leaf) for leaf in pytree.flatten(tree)[0]]


@every("size", SIZES)
@every("name", choices())
@every("op", ["SUM", "MEAN", "PROD"])
def test_every_way_gives_the_numbers_of_numpy(name, size, op):
    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=made(name, size), comm=comm)
        return strategy.run(lambda: [ctx().all_reduce(op, values(comm.rank))]).pop()

    fold = {"SUM": np.sum, "MEAN": np.mean, "PROD": np.prod}[op]
    wants = [
        fold(np.stack([np.asarray(v, _wide(v.dtype)) for v in column]), axis=0)
        for column in zip(*(leaves(values(r)) for r in range(size)), strict=True)
    ]
    found = run_ranks(rank, size)
    for tree in found:
        got = [leaf.local for leaf in pytree.flatten(tree)[0]]
        for one, want, source in zip(got, wants, leaves(values(0)), strict=True):
            tolerance = 2e-3 if source.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(one, want, rtol=tolerance, atol=tolerance)
            if op != "MEAN" or source.dtype.kind != "i":
                assert np.asarray(one).dtype == source.dtype
    bits = [[np.asarray(leaf.local).tobytes() for leaf in pytree.flatten(t)[0]] for t in found]
    assert all(other == bits[0] for other in bits)


def _wide(dtype):
    return np.float64 if dtype == np.float16 else dtype


@every("size", SIZES)
@every("name", choices())
@every("dtype", ["float32", "float64", "longdouble", "int64"])
def test_a_nan_is_the_smallest_and_the_largest(name, size, dtype):
    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=made(name, size), comm=comm)
        mine = np.array([comm.rank, -comm.rank, 3]).astype(dtype)
        if np.dtype(dtype).kind == "f" and comm.rank == size - 1:
            mine[2] = np.nan
        pair = strategy.run(lambda: [ctx().all_reduce(op, mine) for op in ("MIN", "MAX")])
        return [one.local for one in pair]

    last = np.nan if np.dtype(dtype).kind == "f" else 3
    for low, high in run_ranks(rank, size):
        np.testing.assert_array_equal(low, np.array([0, 1 - size, last]).astype(dtype))
        np.testing.assert_array_equal(high, np.array([size - 1, 0, last]).astype(dtype))
        assert low.dtype == np.dtype(dtype)


@pytest.mark.parametrize("name", choices())
def test_weights_and_counts(name):
    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=made(name, 3), comm=comm)
        value = np.full(100, np.nan if comm.rank == 0 else float(comm.rank))
        mean = strategy.run(lambda: ctx().all_reduce("MEAN", value, weight=comm.rank))
        rows = ms.PerReplica(np.arange(comm.rank * 2.0))
        return mean.local, strategy.reduce("MEAN", rows, axis=0)

    for mean, over_rows in run_ranks(rank, 3):
        np.testing.assert_allclose(mean, np.full(100, (1 + 4) / 3))
        np.testing.assert_allclose(over_rows, np.mean([0, 1, 0, 1, 2, 3]))


NAMES = [
    *[{"cross_device_ops": choices()[name]()} for name in ("native", "nodes of two", "root")],
    *[{"implementation": how} for how in ("RING", "nccl", "AUTO")],
    {"bytes_per_pack": 8, "implementation": "RING"},
]


@pytest.mark.parametrize("chosen", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_names_of_algorithms_choose_nothing(size, chosen):
    """The same calls move the same bytes, and give the same bits; on one rank only, too."""

    def rank(comm, chosen):
        noted = record(comm)
        by_class = "cross_device_ops" in chosen
        options = None if by_class or not chosen else ms.CommunicationOptions(**chosen)
        strategy = ms.MirroredStrategy(comm=comm, **(chosen if by_class else {}))
        noted.clear()
        fold = lambda value: ctx().all_reduce("MEAN", value, options)  # noqa: E731
        for value in (values(comm.rank), 1.0, values(comm.rank)):
            total = strategy.run(lambda value=value: [fold(value)]).pop()
        rows = strategy.run(lambda: ctx().all_gather(np.ones((comm.rank, 500)), 0, options))
        arrays = [leaf.local for leaf in [*pytree.flatten(total)[0], rows]]
        return list(noted), [np.asarray(array).tobytes() for array in arrays]

    assert run_ranks(rank, size, chosen) == run_ranks(rank, size, {})

    def mixed(comm):
        return rank(comm, chosen if comm.rank == 1 else {})

    assert run_ranks(mixed, size) == run_ranks(rank, size, {})


def test_a_function_adds_in_replica_order_on_every_rank():
    seen = []

    def joined(values):
        seen.append([value.tolist() for value in values])
        return values[0] - sum(values[1:])

    def rank(comm):
        ops = ms.ReductionToOneDevice("rank:2", joined)
        strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        mean = strategy.run(lambda: ctx().all_reduce("MEAN", np.array([8.0 * comm.rank])))
        return mean.local.tolist()

    assert run_ranks(rank, 3) == [[(0 - 8 - 16) / 3]] * 3
    assert seen == [[[0.0], [8.0], [16.0]]] * 3


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_a_function_adds_where_the_class_is_called(make):
    def rank(comm):
        ops = ms.ReductionToOneDevice(accumulation_fn=lambda values: values[0] - sum(values[1:]))
        strategy = make(comm=comm)
        value = strategy.run(lambda: np.array([8.0 * comm.rank, 1.0]))
        rows = strategy.run(lambda: ms.IndexedSlices(np.ones((1, 2)), [comm.rank], (3, 2)))
        with strategy.scope():
            total = ops.reduce("SUM", value, "rank:0")
            least = ops.reduce("MIN", value, "rank:0")
            slices = ops.reduce("SUM", rows, "rank:0")
        return total.tolist(), least.tolist(), np.asarray(slices).tolist()

    assert run_ranks(rank, 3) == [([-24.0, -1.0], [0.0, 1.0], [[1.0, 1.0]] * 3)] * 3


def test_a_function_that_fails_fails_everywhere():
    def rank(comm):
        def broken(values):
            if comm.rank == 1:
                raise ZeroDivisionError("no sum today")
            return sum(values)

        functions = [
            (broken, ZeroDivisionError, "no sum today"),
            (lambda values: values[0][:2], ms.StructureError, "AccumulationFunction returned"),
            (lambda values: values[0] + comm.rank, ms.LockstepError, "the same on every rank"),
        ]
        for function, error, text in functions:
            ops = ms.ReductionToOneDevice(accumulation_fn=function)
            strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
            with pytest.raises(error, match=text):
                strategy.run(lambda: ctx().all_reduce("SUM", np.ones(500)))
        return float(strategy.run(lambda: ctx().all_reduce("MAX", 1.0)).local)

    assert run_ranks(rank, 3) == [1.0] * 3


@pytest.mark.parametrize("other", [None, ms.NcclAllReduce(2)])
def test_ranks_that_choose_differently_are_told(other):
    def rank(comm):
        ops = ms.ReductionToOneDevice(accumulation_fn=sum) if comm.rank else other
        strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        with pytest.raises(ms.LockstepError, match=r"by mpistrat.*ReductionToOneDevice"):
            strategy.run(lambda: ctx().all_reduce("SUM", np.ones(500)))
        return strategy.run(lambda: comm.rank).local

    assert run_ranks(rank, 3) == [0, 1, 2]


class Largest(ms.CrossDeviceOps):
    """Takes the largest of all values, whatever it is asked for, and notes what it was."""

    def __init__(self):
        self.asked = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.asked.append((reduce_op.value, options.bytes_per_pack))
        values = ms.get_strategy().experimental_local_results(per_replica_value)
        assert ms.in_cross_replica_context()
        return np.maximum.reduce(values)


def test_a_class_of_the_program_moves_everything():
    def rank(comm):
        ops = Largest()
        strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        with strategy.scope():
            v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
        mine = np.array([comm.rank, -comm.rank])
        options = ms.CommunicationOptions(bytes_per_pack=9)
        both = strategy.run(lambda: ctx().all_reduce("SUM", [mine, mine + 1], options))
        reduced = strategy.reduce("SUM", strategy.run(lambda: float(comm.rank)), axis=None)
        strategy.run(lambda: v.assign_add(float(comm.rank)))
        weighted = strategy.run(lambda: ctx().all_reduce("MEAN", 4.0, weight=2 + comm.rank)).local
        alike = strategy.run(lambda: ctx().all_reduce("MEAN", 4.0, weight=2)).local
        to = strategy.extended.reduce_to("MEAN", ms.PerReplica(np.float16(comm.rank)), v)
        gathered = strategy.run(lambda: ctx().all_gather(mine, axis=0)).local
        return (
            [one.local.tolist() for one in both],
            float(reduced),
            float(v.numpy()),
            (float(weighted), float(alike)),
            (float(to), to.dtype),
            gathered.tolist(),
            ops.asked,
        )

    # What counts alike is a mean that the class makes; else it sums, and is divided here.
    asked = [("SUM", 9)] * 2 + [("SUM", 0)] * 3 + [("MEAN", 0)] * 2
    means = (4 * 4 / 9, 4.0)
    want = ([[2, 0], [3, 1]], 2.0, 3.0, means, (2.0, np.float16), [0, 0, 1, -1, 2, -2], asked)
    assert run_ranks(rank, 3) == [want] * 3


def test_what_a_class_of_the_program_gets_wrong_is_an_error_everywhere():
    class Own(ms.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return per_replica_value.local

    class Longer(ms.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return np.ones(9)

    class Last(ms.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            if ms.get_strategy()._replicas.lockstep.comm.rank == 1:
                raise KeyError("mine")
            return np.ones(3)

    def rank(comm):
        for ops, error, text in (
            (Own(), ms.LockstepError, "must return the same"),
            (Longer(), ms.StructureError, "returned shape"),
            (Last(), KeyError, "mine"),
            (ms.CrossDeviceOps(), NotImplementedError, "must define reduce_implementation"),
        ):
            strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
            with pytest.raises(error, match=text):
                strategy.run(lambda: ctx().all_reduce("SUM", np.full(3, float(comm.rank))))
        return strategy.run(lambda: comm.rank).local

    assert run_ranks(rank, 2) == [0, 1]


@pytest.mark.parametrize("ops", [ms.NcclAllReduce, Largest])
def test_a_nan_is_told_of_on_every_way(ops, monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", "raise")

    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=ops(), comm=comm)
        value = np.array([1.0, np.nan if comm.rank else 2.0])
        with pytest.raises(ms.NonFiniteError, match="is nan at index"):
            strategy.run(lambda: ctx().all_reduce("SUM", value))
        return True

    assert run_ranks(rank, 2) == [True] * 2


@pytest.mark.parametrize("name", choices())
def test_results_go_where_they_are_wanted(name):
    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=made(name, 3), comm=comm)
        mine = {"a": np.full(500, comm.rank + 1.0), "b": np.full(3, comm.rank, np.int32)}
        other = {"a": np.empty(500), "b": np.empty(3, np.int32)}
        for _ in range(3):
            assert strategy.run(lambda: [ctx().all_reduce("SUM", mine, out=other) is other])
        for _ in range(2):
            strategy.run(lambda: [ctx().all_reduce("SUM", mine, out=mine)])
        return [float(tree[leaf][0]) for tree in (other, mine) for leaf in "ab"]

    assert run_ranks(rank, 3) == [[6.0, 3.0, 18.0, 9.0]] * 3


def test_called_directly():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = ms.PerReplica(np.full(500, float(comm.rank)))
        strategy.reduce("SUM", value, axis=None)  # memory is shared from now on
        noted = record(comm)
        ops = ms.ReductionToOneDevice()
        with strategy.scope():
            one = ops.reduce("SUM", value, value)
            two = ops.batch_reduce("MEAN", [(value, value), (value, "rank:0")])
            sent = ms.NcclAllReduce().broadcast(np.float32(comm.rank + 5), value)
            calls = moved(noted)
            for wrong in (None, "", [value]):
                with pytest.raises(ms.StructureError, match="destinations must be"):
                    ops.reduce("SUM", value, wrong)
            with pytest.raises(ms.StructureError, match="list of tuples"):
                ops.batch_reduce("SUM", [[value, value]])
        kinds = [type(x).__name__ for x in (one, *two, sent)]
        numbers = [float(np.asarray(x).reshape(-1)[0]) for x in (one, *two, sent)]
        return kinds, numbers, calls

    for kinds, numbers, calls in run_ranks(rank, 3):
        assert kinds == ["Mirrored", "Mirrored", "ndarray", "Mirrored"]
        assert numbers == [3.0, 1.0, 1.0, 5.0]
        assert calls == ["bcast"]  # the sums are in shared memory


class Last(Largest):
    """Gives the last replica's value to all, and not the first one's."""

    def __init__(self):
        self.given = []

    def broadcast_implementation(self, tensor, destinations):
        strategy = ms.get_strategy()
        self.given.append((ms.in_cross_replica_context(), tensor.dtype.name, tensor.shape))
        rank = strategy._replicas.lockstep.comm.rank
        mine = strategy.run(lambda: tensor if rank >= 0 else None)
        return strategy.experimental_local_results(mine)[-1]


@pytest.mark.parametrize("size", SIZES)
def test_a_class_of_the_program_broadcasts(size):
    def rank(comm):
        ops = Last()
        strategy = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        mine = np.full(3, comm.rank + 1, np.float32)
        with strategy.scope():
            variable = ms.Variable(0.0)
        every = strategy.extended.broadcast_to(mine, variable)
        label = strategy.extended.broadcast_to(mine, "rank:0")
        number = strategy.extended.broadcast_to(comm.rank + 1, "rank:0")
        old = v1.MirroredStrategy(cross_device_ops=ops)
        again = old.extended.broadcast_to(mine, "rank:0")
        assert isinstance(every, ms.Mirrored)
        assert (type(number), number, np.asarray(every).dtype) == (int, size, np.float32)
        with strategy.scope():
            assert ops.broadcast(mine, "rank:0").tolist() == [size] * 3
        return [np.asarray(x).tolist() for x in (every, label, again)], ops.given

    given = [(True, "float32", (3,))] * 2 + [(True, "int64", ())] + [(True, "float32", (3,))] * 2
    assert run_ranks(rank, size) == [([[size] * 3] * 3, given)] * size


def test_what_a_class_broadcasts_is_proved_and_its_errors_are_everybodys():
    class Wrong(Largest):
        def __init__(self, how):
            self.how = how

        def broadcast_implementation(self, tensor, destinations):
            return self.how(tensor)

    def rank(comm):
        def fail(tensor):
            if comm.rank == 1:
                raise KeyError("here")
            return tensor

        ways = [
            (lambda tensor: tensor, ms.LockstepError, "same on every rank"),
            (fail, KeyError, "here"),
            (lambda tensor: tensor[:1], ms.StructureError, "returned shape"),
            (lambda tensor: tensor * 1j, ms.StructureError, "returned complex128"),
        ]
        for how, error, said in ways:
            strategy = ms.MirroredStrategy(cross_device_ops=Wrong(how), comm=comm)
            with pytest.raises(error, match=said):
                strategy.extended.broadcast_to(np.full(2, comm.rank + 1.0), "rank:0")
        plain = ms.MirroredStrategy(cross_device_ops=Largest(), comm=comm)  # which has none
        return plain.extended.broadcast_to(np.full(2, comm.rank + 1.0), "rank:0").tolist()

    assert run_ranks(rank, 3) == [[1.0, 1.0]] * 3


SUM = ms.ReduceOp.SUM
WRONG = {
    "destinations": (lambda ops, v: ops.reduce(SUM, v, None), ms.StructureError),
    "operation": (lambda ops, v: ops.reduce("TOTAL", v, v), ValueError),
    "no operation": (lambda ops, v: ops.reduce(3, v, v), TypeError),
    "options": (lambda ops, v: ops.reduce(SUM, v, v, "fast"), ValueError),
    "no pairs": (lambda ops, v: ops.batch_reduce(SUM, 7), ms.StructureError),
    "a pair": (lambda ops, v: ops.batch_reduce(SUM, [(v,)]), ms.StructureError),
    "destinations of a pair": (lambda ops, v: ops.batch_reduce(SUM, [(v, 3)]), ms.StructureError),
    "operation of pairs": (lambda ops, v: ops.batch_reduce("TOTAL", [(v, v)]), ValueError),
    "options of pairs": (lambda ops, v: ops.batch_reduce(SUM, [(v, v)], 4), ValueError),
    "destinations of a broadcast": (lambda ops, v: ops.broadcast(1.0, ""), ms.StructureError),
}


@pytest.mark.parametrize("ops", [ms.ReductionToOneDevice, Largest])
@pytest.mark.parametrize("what", WRONG)
def test_what_one_rank_gives_wrong_raises_on_all(ops, what):
    call, error = WRONG[what]

    def good(ops, value):
        if "broadcast" in what:
            return ops.broadcast(np.ones(2), value)
        if "pair" in what:
            return ops.batch_reduce(SUM, [(value, value)])
        return ops.reduce(SUM, value, value)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = strategy.run(lambda: np.full(300, comm.rank))
        with strategy.scope():
            with pytest.raises(error) as found:
                (call if comm.rank == 1 else good)(ops(), value)
            after = ops().reduce(SUM, value, value)  # the ranks are in step still
        kind = ms.RemoteError if comm.rank != 1 else error
        assert isinstance(found.value, kind)
        return float(np.asarray(after).reshape(-1)[0])

    want = 3.0 if ops is ms.ReductionToOneDevice else 2.0
    assert run_ranks(rank, 3) == [want] * 3


def test_wrong_arguments():
    with pytest.raises(ValueError, match="requires num_packs >= 0, but -1"):
        ms.NcclAllReduce(-1)
    with pytest.raises(ValueError, match="HierarchicalCopy requires num_packs >= 0"):
        ms.HierarchicalCopyAllReduce(-1)
    with pytest.raises(ValueError, match="ranks_per_node"):
        ms.HierarchicalCopyAllReduce(ranks_per_node=-2)
    with pytest.raises(TypeError, match="must be an instance of CrossDeviceOps"):
        ms.MirroredStrategy(cross_device_ops="nccl")
    with pytest.raises(ValueError, match="reduce_to_device must be the label"):
        ms.ReductionToOneDevice(1.5)
    ms.MirroredStrategy(["a"], ms.ReductionToOneDevice("a"))


def test_options_of_a_call_go_over_those_of_the_strategy():
    def rank(comm):
        minute = ms.CommunicationOptions(timeout_seconds=60)
        shorter = ms.CommunicationOptions(implementation="NCCL", timeout_seconds=50)
        strategy = ms.MultiWorkerMirroredStrategy(None, minute, comm=comm)
        value, texts = np.ones(500), []
        real = strategy._replicas.lockstep.limiting_seconds

        def within(seconds):
            texts.append(seconds)
            return real(seconds)

        strategy._replicas.lockstep.limiting_seconds = within
        strategy.run(lambda: ctx().all_reduce("SUM", value, shorter))
        strategy.run(lambda: ctx().all_gather(value, 0, shorter))
        strategy.extended.reduce_to("SUM", value, "rank:0", shorter)
        strategy.extended.batch_reduce_to("SUM", [(value, "rank:0")] * 2, options=shorter)
        assert set(texts) == {50}
        with pytest.raises(ValueError, match="must be an instance of CommunicationOptions"):
            strategy.run(lambda: ctx().all_reduce("SUM", value, "fast"))
        return len(texts)

    assert run_ranks(rank, 2) == [4] * 2


@pytest.mark.parametrize("mine", [{}, {"timeout_seconds": 7, "implementation": "RING"}])
def test_ranks_with_other_options_are_told(mine):
    def rank(comm):
        options = ms.CommunicationOptions(timeout_seconds=50)
        options = ms.CommunicationOptions(**mine) if comm.rank else options
        strategy = ms.MultiWorkerMirroredStrategy(None, options, comm=comm)
        with pytest.raises(ms.LockstepError, match="within 50 s"):
            strategy.run(lambda: ctx().all_reduce("SUM", 1.0))
        return True

    assert run_ranks(rank, 2) == [True] * 2


class Clocked:
    """A board that notes, for each call and each part of one, how long it may take."""

    def __init__(self):
        self.noted, self.seconds, self.text = [], None, ""
        self.leave = lambda: None
        self.resume = lambda: self.noted.append((self.text, self.seconds))

    def allow(self, seconds):
        self.seconds = seconds

    def enter(self, number, text):
        self.text = text
        self.noted.append((text, self.seconds))

    def times(self):
        found = {seconds for _, seconds in self.noted}
        self.noted.clear()
        return found


def failed(strategy):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)


def test_the_time_of_a_strategy_is_that_of_all_its_calls():
    def rank(comm):
        options = ms.CommunicationOptions(timeout_seconds=7)
        timed = ms.MultiWorkerMirroredStrategy(None, options, comm=comm)
        other = ms.MirroredStrategy(comm=comm)
        session = timed._replicas.lockstep.session
        session.board, timed._replicas.lockstep.state.board_seconds = (board := Clocked()), None
        value = np.full(300, 1.0)
        with timed.scope():
            variable = ms.Variable(value, aggregation=ms.VariableAggregation.SUM)
            own = ms.Variable(1.0, synchronization=ms.VariableSynchronization.ON_READ,
                              aggregation=ms.VariableAggregation.SUM)  # fmt: skip
        data = ms.Dataset({"x": value}).batch(100)
        batches = timed.experimental_distribute_dataset(data)
        calls = {
            "create": lambda: None,
            "run": lambda: timed.run(lambda: None),
            "a failed run": lambda: failed(timed),
            "all_reduce": lambda: timed.run(lambda: ctx().all_reduce("SUM", value)),
            "a number": lambda: timed.run(lambda: ctx().all_reduce("SUM", 1.0)),
            "gather": lambda: timed.gather(value, 0),
            "reduce": lambda: timed.reduce("SUM", value, axis=0),
            "assign": lambda: variable.assign(value),
            "replicas assign": lambda: timed.run(lambda: variable.assign(value).dtype.char),
            "read": lambda: own.numpy(),
            "update": lambda: timed.extended.update(variable, lambda v: v.assign(value)),
            "distribute": lambda: timed.experimental_distribute_dataset(data),
            "steps": lambda: list(batches),
            "group": lambda: timed.group(None),
            "buffers": lambda: timed.buffers([value]),
        }
        found = {}
        for name, call in calls.items():
            call()
            found[name] = board.times()
        shorter = ms.CommunicationOptions(timeout_seconds=3)
        for strategy in (timed, other):
            strategy.run(lambda: ctx().all_reduce("SUM", value, shorter))
            found[f"its own, {type(strategy).__name__}"] = board.times()
        for _ in range(3):  # also one that is known already
            other.run(lambda: ctx().all_reduce("SUM", 1.0))
        found["none"] = board.times()
        return found

    for found in run_ranks(rank, 2):
        assert found.pop("its own, MultiWorkerMirroredStrategy") == {3, 7}
        assert found.pop("its own, MirroredStrategy") == {3, None}
        assert found.pop("none") == {None}
        assert found == {name: {7} for name in found}


def test_leaving_is_no_call_of_a_strategy():
    boards = [Clocked(), Clocked()]

    def rank(comm):
        options = ms.CommunicationOptions(timeout_seconds=7)
        timed = ms.MultiWorkerMirroredStrategy(None, options, comm=comm)
        session = timed._replicas.lockstep.session
        session.board, timed._replicas.lockstep.state.board_seconds = boards[comm.rank], None
        timed.run(lambda: None)

    run_ranks(rank, 2)
    for board in boards:
        assert board.noted[0][1] == 7
        assert board.noted[-1] == ("leave the program", None)


class Rows(Largest):
    """Concatenates the rows of all replicas, last replica first, and notes what it was given."""

    def __init__(self):
        self.given = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        all_ = ms.get_strategy().experimental_local_results(per_replica_value)[::-1]
        self.given.append((reduce_op, type(all_[0])))
        if not isinstance(all_[0], ms.IndexedSlices):
            return sum(all_)
        divisor = len(all_) if reduce_op is ms.ReduceOp.MEAN else 1
        values = np.concatenate([one.values / divisor for one in all_])
        return ms.IndexedSlices(values, np.concatenate([one.indices for one in all_]))


@pytest.mark.parametrize("seconds", [None, 50])
def test_a_class_of_the_program_folds_rows_too(seconds):
    def rank(comm):
        ops = Rows()
        s = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        me = comm.rank
        rows = ms.IndexedSlices(np.full((me + 1, 2), me + 1.0, "f2"), np.arange(me + 1), (4, 2))
        options = None if seconds is None else ms.CommunicationOptions(timeout_seconds=seconds)

        def fn():
            both = ctx().all_reduce("SUM", [rows, np.ones(2)], options)
            mean = ctx().all_reduce("MEAN", rows, options)
            weighed = ctx().all_reduce("MEAN", rows, options, weight=float(me))
            return both, mean, weighed

        (total, dense), mean, weighed = pytree.map(lambda leaf: leaf.local, s.run(fn))
        to = s.extended.reduce_to("SUM", s.run(lambda: rows), "rank:0")
        with s.scope():
            v = ms.Variable(np.zeros((4, 2)), aggregation=ms.VariableAggregation.SUM)
        s.run(lambda: v.scatter_add(ms.IndexedSlices(np.ones((1, 2)), [me])))
        kinds = [kind.__name__ for _, kind in ops.given]
        firsts = [one.values[:, 0].tolist() for one in (total, mean, weighed, to)]
        same = {one.values.dtype.name for one in (total, mean, weighed, to)}
        dtypes = [same, dense.tolist(), total.dense_shape]
        return firsts, dtypes, total.indices.tolist(), kinds, v.numpy()[:, 0].tolist()

    want = (
        [[2, 2, 1], [1, 1, 0.5], [2, 2, 0], [2, 2, 1]],
        [{"float16"}, [2, 2], (4, 2)],
        [0, 1, 0],
        ["ndarray"] + ["IndexedSlices"] * 5,
        [1, 1, 0, 0],
    )
    assert run_ranks(rank, 2) == [want] * 2


def test_a_class_that_makes_no_rows_of_rows_is_an_error_everywhere():
    def rank(comm):
        s = ms.MirroredStrategy(cross_device_ops=Dense(), comm=comm)
        rows = ms.IndexedSlices(np.ones((1, 2)), [0])
        with pytest.raises(ms.StructureError, match="returned ndarray for IndexedSlices"):
            s.run(lambda: ctx().all_reduce("SUM", rows))
        native = ms.CommunicationOptions(implementation="NCCL")
        got = s.run(lambda: ctx().all_reduce("SUM", rows, native)).local
        return len(got.values), s.run(lambda: comm.rank).local

    class Dense(ms.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return np.ones((1, 2))

    assert run_ranks(rank, 2) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("how", ["RING", "NCCL"])
def test_the_implementation_of_a_call_goes_over_the_class_of_the_strategy(how):
    def rank(comm):
        ops = Largest()
        s = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        options = ms.CommunicationOptions(implementation=how)
        got = s.run(lambda: ctx().all_reduce("SUM", np.ones(500), options)).local
        return ops.asked, float(got[0])

    assert run_ranks(rank, 2) == [([], 2.0)] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.ReductionToOneDevice(0.5),
        lambda: ms.ReductionToOneDevice(True),
        lambda: ms.ReductionToOneDevice([0]),
        lambda: ms.NcclAllReduce(1.5),
        lambda: ms.NcclAllReduce(True),
        lambda: ms.NcclAllReduce("1"),
        lambda: ms.HierarchicalCopyAllReduce(-1),
        lambda: ms.HierarchicalCopyAllReduce(None),
        lambda: ms.HierarchicalCopyAllReduce(ranks_per_node=2.0),
        lambda: ms.HierarchicalCopyAllReduce(ranks_per_node=-1),
    ],
)
def test_numbers_of_packs_and_roots_are_whole(make):
    with pytest.raises(ValueError, match=r"must be|requires"):
        make()
    ms.NcclAllReduce(np.int32(2))
    ms.HierarchicalCopyAllReduce(ranks_per_node=np.int64(2))


def test_in_the_local_view_a_value_is_a_destination():
    def program(comm):
        strategy = ms.MultiWorkerMirroredStrategy()

        def merge(strategy, value):
            one = strategy.extended.reduce_to("sum", value, value)
            [two] = strategy.extended.batch_reduce_to("sum", [(value, value)])
            return one + two

        def replica():
            value = np.full(3, comm.rank + 1.0)
            return ms.get_replica_context().merge_call(merge, args=(value,))

        return strategy.run(replica).tolist()

    assert run_ranks(program, 3) == [[12.0] * 3] * 3


@pytest.mark.parametrize("make", [np.float32, np.array, float, int], ids=lambda m: m.__name__)
@pytest.mark.parametrize("n", [1, 3])
def test_what_has_no_dimensions_is_a_destination_where_values_are_plain(n, make):
    def program(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        value = make(comm.rank + 1)
        one = strategy.extended.reduce_to("sum", value, value)
        [two] = strategy.extended.batch_reduce_to("mean", [(value, value)])
        direct = ms.NcclAllReduce()
        with strategy.scope():
            three = direct.reduce("sum", value, value)
            kept = direct.broadcast(value, value)
        mine = strategy.extended.broadcast_to(value, value)
        return float(one), float(two), float(three), mine is value, kept is value

    total = n * (n + 1) / 2
    assert run_ranks(program, n) == [(total, total / n, total, True, True)] * n


def test_the_value_of_one_device_is_a_destination():
    extended = ms.OneDeviceStrategy("cpu").extended
    for value in (np.float32(2), np.ones(3), 2.0):
        assert np.array_equal(extended.reduce_to("sum", value, value), value)
        assert extended.broadcast_to(value, value) is value
    with pytest.raises(ms.StructureError, match="destinations must be"):
        ms.MirroredStrategy().extended.reduce_to("sum", ms.PerReplica(1.0), np.float32(1))
