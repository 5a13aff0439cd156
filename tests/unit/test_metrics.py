"""Metrics beside NumPy over the examples of all replicas, however unevenly these have them."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from python_calls import calls_of

import mpistrat as ms
from mpistrat.metrics import Accuracy, Confusion, Mean
from mpistrat.testing import run_ranks
from mpistrat.testing.ranks import RanksFailed

SIZES = (1, 2, 3, 4)
ROWS = (0, 7, 1, 3)  # of each replica in turn; the first has none
sizes = pytest.mark.parametrize("size", SIZES)


def examples(size, step=0):
    """Values, weights, labels and scores of every replica."""
    rng = np.random.default_rng(step)
    found = []
    for replica in range(size):
        n = ROWS[(replica + step) % 4]
        values, weights = rng.standard_normal((n, 2)), rng.integers(0, 3, n) / 2
        values[weights == 0] = np.nan
        scores = rng.standard_normal((n, 4))
        found.append((values, weights, rng.integers(0, 4, n), scores, scores.argmax(axis=1)))
    return found


def over_all(size):
    """What two steps come to, by NumPy over what all replicas have."""
    rows = [row for step in (0, 1) for row in examples(size, step)]
    values, weights, labels, scores, predicted = map(np.concatenate, zip(*rows, strict=True))
    used = weights > 0
    matrix = np.zeros((4, 4))
    for true, row, weight in zip(labels, scores, weights, strict=True):
        matrix[true, max(range(4), key=lambda i, row=row: row[i])] += weight
    mean = np.average(values[used].mean(axis=1), weights=weights[used]) if used.any() else 0.0
    hits = np.trace(matrix) / weights.sum() if used.any() else 0.0
    plain = np.mean(predicted == labels) if len(labels) else 0.0
    return mean, hits, matrix, plain


def metrics():
    kinds = (Mean("loss"), Accuracy(), Confusion(4, dtype=np.float64))
    return (*kinds, Accuracy("plain"))


def update(found, values, weights, labels, scores, predicted):
    loss, accuracy, confusion, plain = found
    loss.update_state(values, weights)
    accuracy.update_state(labels, scores, sample_weight=weights)
    confusion.update_state(labels, scores, weights)
    plain.update_state(labels, predicted)


def check(found, size):
    for metric, want in zip(found, over_all(size), strict=True):
        value = metric.result()
        assert type(value) is (np.ndarray if isinstance(metric, Confusion) else float)
        np.testing.assert_allclose(value, want, rtol=1e-14)


@sizes
@pytest.mark.parametrize("way", ["run", "per replica"])
def test_every_example_counts_once(size, way):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            found = metrics()
        for step in (0, 1):
            mine = examples(size, step)[strategy.rank]
            if way == "run":
                strategy.run(update, args=(found, *mine))
            else:
                update(found, *strategy.run(lambda mine=mine: mine))
        check(found, size)
        own = strategy.run(lambda: found[2].result().sum()).local
        assert own == sum(examples(size, step)[strategy.rank][1].sum() for step in (0, 1))
        for metric in found:
            metric.reset_state()
            assert not np.any(metric.result())

    run_ranks(program, size)


@sizes
def test_plain_values_of_cross_replica_code_are_the_whole_batch(size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            found = metrics()
        for step in (0, 1):
            rows = [np.concatenate(column) for column in zip(*examples(size, step), strict=True)]
            update(found, *rows)
        check(found, size)
        rows = [row for step in (0, 1) for row in examples(size, step)]
        assert found[3].variables[1].numpy() == sum(len(row[0]) for row in rows)
        if size > 1:
            with pytest.raises(ms.LockstepError, match="values differs between ranks"):
                found[0].update_state(float(strategy.rank))
            check(found, size)

    run_ranks(program, size)


@sizes
@pytest.mark.parametrize(
    "make",
    [ms.MultiWorkerMirroredStrategy, lambda: ms.OneDeviceStrategy("cpu"), ms.get_strategy],
    ids=["multi-worker", "one device", "default"],
)
def test_other_strategies(size, make):
    """For the local view plain values are this rank's own, as `run` returns them."""
    alone = make is not ms.MultiWorkerMirroredStrategy

    def program(comm):
        strategy = make()
        with strategy.scope():
            mean = Mean()
        rows = np.arange(comm.rank, 4.0)
        values = strategy.run(lambda: rows)
        mean.update_state(values)
        strategy.run(mean.update_state, args=(rows,))
        all_ = rows if alone else np.concatenate([np.arange(r, 4.0) for r in range(size)])
        assert mean.result() == all_.mean()
        assert mean.variables[1].numpy() == 2 * len(all_)

    run_ranks(program, size)


def test_in_a_plain_process():
    mean, accuracy, confusion = Mean(), Accuracy(), Confusion(3)
    assert [m.name for m in (mean, accuracy, confusion)] == ["mean", "accuracy", "confusion"]
    assert [v.name for v in mean.variables] == ["mean/total:0", "mean/count:0"]
    assert mean.result() == accuracy.result() == 0.0
    for value in (2, 4.0, np.float32(3), ms.Variable(3.0), [1, 5], ml_dtypes.bfloat16(3)):
        mean.update_state(value)
    mean.update_state(np.zeros((0, 3)))
    mean.update_state(np.nan, sample_weight=0)
    assert mean.result() == 3.0
    assert mean.variables[1].numpy() == 7
    confusion.update_state([[0, 2], [2, 2]], [[0, 1], [2, 2]])
    confusion.update_state(2, 1, sample_weight=2)
    assert confusion.result().dtype == np.int64
    np.testing.assert_array_equal(confusion.result(), [[1, 0, 0], [0, 0, 0], [0, 3, 2]])
    confusion.result()[:] = 7
    assert confusion.result().sum() == 6
    another = copy.deepcopy(mean)
    another.update_state(100.0)
    assert mean.result() == 3.0 < another.result()


@pytest.mark.parametrize(
    ("shape", "weights", "want"),
    [
        ((2, 3), [1.0, 3.0], [[1.0], [3.0]]),
        ((2, 3), [[1.0], [3.0]], [[1.0], [3.0]]),
        ((2, 3), np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3)),
        ((2, 2), [0.0, 2.0], [[0.0], [2.0]]),  # of examples, not of columns
        ((2, 3), 0.5, 0.5),
    ],
)
def test_weights_go_with_the_first_axes(shape, weights, want):
    values = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    mean = Mean()
    mean.update_state(values, weights)
    assert mean.result() == np.average(values, weights=np.broadcast_to(want, shape))


def test_sums_are_of_64_bits_whatever_comes():
    mean = Mean()
    mean.update_state(np.full(10_000, 60_000, np.float16))
    mean.update_state(np.full(1, 2**31 - 1, np.int32), sample_weight=np.float16(3))
    assert mean.result() == (10_000 * 60_000.0 + 3 * (2.0**31 - 1)) / 10_003
    mean.reset_state()
    mean.update_state([np.inf, -np.inf])  # and no warning
    assert np.isnan(mean.result())


BAD = [
    (Mean, ([1.0], [1.0, 2.0]), ms.StructureError, "sample_weight of shape"),
    (Mean, (np.ones((2, 3)), np.ones(3)), ms.StructureError, "sample_weight of shape"),
    (Mean, ([1.0, 2.0], [1.0, -1.0]), ValueError, r"sample_weight\[1\] is -1.0"),
    (Mean, ([1.0, 2.0], [np.nan, 1.0]), ValueError, r"sample_weight\[0\] is nan"),
    (Mean, (1.0, np.inf), ValueError, "sample_weight is inf"),
    (Mean, (1j,), ms.LeafTypeError, "real numbers"),
    (Mean, ("one",), ms.LeafTypeError, "expected an array or a number"),
    (Mean, (None,), ms.LeafTypeError, "'values' is None"),
    (Accuracy, (np.ones(2), None), ms.LeafTypeError, "'y_pred' is None"),
    (lambda: Confusion(3), (None, [1], [1.0]), ms.LeafTypeError, "'y_true' is None"),
    (Accuracy, ([0, 1], [0, 1, 1]), ms.StructureError, "expected labels of the same shape"),
    (Accuracy, ([0, 1], [[0.1], [0.9]]), ms.StructureError, "two or more"),
    (Accuracy, (np.eye(2), np.ones((2, 2))), ms.LeafTypeError, "y_true has dtype float64"),
    (Accuracy, ([0, 1], [0.1, 0.9]), ms.LeafTypeError, "y_pred has dtype float64"),
    (lambda: Confusion(3), ([0, 3], [0, 1]), ValueError, r"y_true\[1\] is 3; classes are 0 to 2"),
    (lambda: Confusion(3), ([[0, 1]], [[0, -1]]), ValueError, r"y_pred\[0, 1\] is -1"),
    (lambda: Confusion(3), (-1, 0), ValueError, "y_true is -1"),
    (lambda: Confusion(300), (np.int8([-1]), np.int8([1])), ValueError, r"y_true\[0\] is -1"),
    (lambda: Confusion(3), ([0, 1], [0, 1], [1, 0.5]), ValueError, "dtype=np.float64"),
]


@pytest.mark.parametrize(("make", "given", "error", "words"), BAD)
def test_what_does_not_fit_changes_nothing(make, given, error, words):
    metric = make()
    with pytest.raises(error, match=words):
        metric.update_state(*given)
    assert not any(np.any(variable) for variable in metric.variables)


@pytest.mark.parametrize(
    "make", [lambda: Confusion(0), lambda: Confusion(2.5), lambda: Confusion(2, dtype=np.int32)]
)
def test_matrices_that_make_no_sense_are_refused(make):
    with pytest.raises((ValueError, TypeError), match=r"classes must be an integer|dtype is"):
        make()


def test_labels_of_weight_0_are_not_read():
    confusion, accuracy = Confusion(2), Accuracy()
    confusion.update_state([-1, 1], [0, 1], [0, 1])
    accuracy.update_state([-1, 1], [0, 1], [0, 1])
    np.testing.assert_array_equal(confusion.result(), [[0, 0], [0, 1]])
    assert accuracy.result() == 1.0


@pytest.mark.parametrize("way", ["run", "per replica"])
def test_a_label_that_is_no_class_on_one_rank_raises_on_all(way):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            confusion = Confusion(3)
        labels = np.array([0, 1, 3 if strategy.rank == 1 else 2])
        if way == "run":
            strategy.run(confusion.update_state, args=(labels, labels))
        else:
            given = strategy.run(lambda: labels)
            confusion.update_state(given, given)
            confusion.result()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(program, 3)
    assert sorted(caught.value.errors) == [0, 1, 2]
    for error in caught.value.errors.values():
        assert "rank 1: Confusion 'confusion': the label y_true[2] is 3" in str(error)
        assert isinstance(error, ValueError)


def test_ranks_that_make_other_calls_are_told():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            one, two = Mean("one"), Mean("two")
        with pytest.raises(ms.LockstepError, match=r"Mean '(one|two)'.result\(\)"):
            (one if strategy.rank else two).result()
        other = ms.OneDeviceStrategy("cpu")
        with pytest.raises(ms.StrategyError, match="Mixing different"), other.scope():
            one.update_state(1.0)
        with pytest.raises(ms.StrategyError, match="another strategy"):
            Mean().update_state(strategy.run(lambda: np.ones(100)))

    run_ranks(program, 2)


@pytest.mark.parametrize(("call", "most"), [("update", 0), ("result", 1), ("reset_state", 1)])
def test_handshakes(call, most):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            mean = Mean()
        session = strategy._replicas.lockstep.session

        def body():
            before = session.calls
            mean.update_state(np.ones(3), np.ones(3))
            return session.calls - before

        if call == "update":
            assert strategy.run(body).local == most
        else:
            before = session.calls
            getattr(mean, call)()
            assert session.calls - before <= most

    run_ranks(program, 2)


@pytest.mark.parametrize(("saved", "again"), [(3, 2), (1, 4)])
def test_checkpoints_at_another_number_of_ranks(saved, again, tmp_path):
    def make():
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            found = {"loss": Mean("loss"), "table": Confusion(3)}
            return strategy, found, ms.Checkpoint(w=ms.Variable(1.0), **found)

    def save(comm):
        strategy, found, checkpoint = make()
        strategy.run(found["loss"].update_state, args=(np.arange(strategy.rank, 3) / 3,))
        strategy.run(found["table"].update_state, args=([1, 2], [1, 1]))
        checkpoint.write(str(tmp_path / "c"))
        return found["loss"].result()

    def restore(comm):
        strategy, found, checkpoint = make()
        strategy.run(found["loss"].update_state, args=(np.nan,))
        checkpoint.read(str(tmp_path / "c")).assert_consumed()
        loss = found["loss"].result()
        strategy.run(found["loss"].update_state, args=(np.ones(6 // again),))
        assert found["table"].result().tolist() == [[0, 0, 0], [0, saved, 0], [0, saved, 0]]
        return loss, found["loss"].result()

    values = np.concatenate([np.arange(r, 3) / 3 for r in range(saved)])
    before = run_ranks(save, saved)[0]
    np.testing.assert_allclose(before, values.mean(), rtol=1e-15)
    more = np.concatenate([values, np.ones(6 // again * again)]).mean()
    for at_once, later in run_ranks(restore, again):
        assert at_once == before
        np.testing.assert_allclose(later, more, rtol=1e-15)


@pytest.mark.parametrize("size", [1, 2])
def test_a_deep_copy_has_sums_of_its_own_and_the_same_strategy(size):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            mean = Mean()
            strategy.run(lambda: mean.update_state([1.0]))
            other = copy.deepcopy({"best": mean})["best"]
            strategy.run(lambda: other.update_state([3.0]))
            return mean.result(), other.result()

    assert run_ranks(rank, size) == [(1.0, 2.0)] * size


def test_python_calls_of_an_update():
    """Of losses in float64 it was 7 calls once."""
    values = np.ones(5)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            mean = Mean("mean")

        def update(times):
            for _ in range(times):
                mean.update_state(values)

        strategy.run(update, args=(9,))
        few, many = (
            calls_of(lambda: strategy.run(update, args=(times,)))  # noqa: B023
            for times in (0, 8)
        )
        return (many - few) / 8

    assert run_ranks(rank, 2) == [3.0, 3.0]
