"""AUC, precision and recall beside their definitions, over uneven and empty parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.metrics import AUC, Precision, Recall
from mpistrat.testing import run_ranks

SIZES = (1, 2, 3, 5)
ROWS = (0, 9, 1, 4, 30)  # of each replica; the first has none, but where it is alone


def examples(size):
    """Return labels, predictions and weights of each replica; weights are exact in binary."""
    parts = []
    for replica in range(size):
        rng = np.random.default_rng(replica)
        count = 20 if size == 1 else ROWS[replica]
        labels = rng.integers(0, 2, count)
        predictions = np.clip(rng.normal(0.4 + 0.2 * labels, 0.3), 0, 1).round(2)
        parts.append((labels, predictions, rng.integers(0, 4, count) / 2))
    return parts


def expected(labels, predictions, weights):
    """Return the three metrics by the definition: a loop over thresholds, as Keras describes it."""

    def counts(threshold):
        is_predicted, is_true = predictions > threshold, labels == 1
        cells = [is_predicted & is_true, is_predicted & ~is_true]
        cells += [~is_predicted & is_true, ~is_predicted & ~is_true]
        return [weights[cell].sum() for cell in cells]

    def divided(x, y):
        return x / y if y else 0.0

    thresholds = [-1e-7, *((i + 1) / 199 for i in range(198)), 1 + 1e-7]
    points = []
    for threshold in thresholds:
        tp, fp, fn, tn = counts(threshold)
        points.append((divided(fp, fp + tn), divided(tp, tp + fn)))
    area = sum(
        (x - next_x) * (y + next_y) / 2 for (x, y), (next_x, next_y) in itertools.pairwise(points)
    )
    tp, fp, fn, _ = counts(0.5)
    return area, divided(tp, tp + fp), divided(tp, tp + fn)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("way", ["run", "per replica", "whole batch"])
@pytest.mark.parametrize("size", SIZES)
def test_all_replicas_together_are_the_definition(size, way, weighted):
    parts = examples(size)
    labels, predictions, weights = map(np.concatenate, zip(*parts, strict=True))
    wanted = expected(labels, predictions, weights if weighted else np.ones(len(labels)))

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            metrics = AUC(), Precision(), Recall()

        def update(y_true, y_pred, sample_weight):
            for metric in metrics:
                metric.update_state(y_true, y_pred, sample_weight if weighted else None)

        if way == "run":
            strategy.run(update, args=parts[comm.rank])
        elif way == "per replica":
            update(*strategy.run(lambda: parts[comm.rank]))
        else:
            update(labels, predictions, weights)
        values = [metric.result() for metric in metrics]
        assert all(type(value) is float for value in values)
        np.testing.assert_allclose(values, wanted, 1e-13)
        own = strategy.run(metrics[0].result).local
        if way == "run":
            y_true, y_pred, sample_weight = parts[comm.rank]
            sample_weight = sample_weight if weighted else np.ones(len(y_true))
            assert own == pytest.approx(expected(y_true, y_pred, sample_weight)[0])
        for metric in metrics:
            metric.reset_state()
            assert metric.result() == 0.0
        return values

    results = run_ranks(program, size)
    assert all(result == results[0] for result in results)


# Those of the documentation of Keras 3, and by hand from its definition.
RECORDED = [
    (AUC("a", 3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), 0.75),
    (AUC("b", 3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9], [1, 0, 0, 1]), 1.0),
    (AUC("c"), ([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]), 0.75),
    (AUC("d"), ([0, 1], [0.5, 0.5]), 0.5),
    (AUC("e"), ([True, False], [0.0, 1.0]), 0.0),
    (AUC("f"), ([[1.0, 0.0]], [[1.0, 0.0]]), 1.0),
    (AUC("g"), ([1, 1], [0.5, 0.7]), 0.0),
    (Precision("h"), ([0, 1, 1, 1], [1, 0, 1, 1]), 2 / 3),
    (Precision("i"), ([0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]), 1.0),
    (Precision("j", 0.7), ([1, 0], [0.8, 0.7]), 1.0),
    (Precision("k"), ([1, 1], [0.5, 0.1]), 0.0),
    (Recall("l"), ([0, 1, 1, 1], [1, 0, 1, 1]), 2 / 3),
    (Recall("m"), ([0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]), 1.0),
    (Recall("n"), ([0, 0], [1, 1]), 0.0),
    (Recall("o", threshold=0), ([1, 1], [0.0, 0.1]), 0.5),
]


@pytest.mark.parametrize(("metric", "arguments", "wanted"), RECORDED, ids=lambda x: repr(x)[:30])
def test_recorded_values(metric, arguments, wanted):
    metric.reset_state()
    metric.update_state(*arguments)
    assert metric.result() == pytest.approx(wanted, abs=1e-15)


def test_the_area_is_near_the_exact_one():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 2000)
    predictions = 1 / (1 + np.exp(-rng.normal(labels, 1.0)))
    auc = AUC()
    auc.update_state(labels, predictions.astype("f4"))
    assert auc.result() == pytest.approx(metrics.roc_auc_score(labels, predictions), abs=1e-4)


def test_results_can_be_asked_for_twice_and_change_no_sums():
    auc = AUC()
    auc.update_state([0, 1], [0.2, 0.6])
    assert auc.result() == auc.result() == 1.0
    assert [variable.name for variable in auc.variables] == ["auc/positives:0", "auc/negatives:0"]
    assert auc.variables[0].numpy().sum() == 1.0


def test_nothing_adds_nothing():
    for metric in (AUC(), Precision(), Recall()):
        metric.update_state(np.zeros((0, 2)), np.zeros((0, 2)))
        metric.update_state([-1], [np.nan], sample_weight=0)
        assert metric.result() == 0.0


@pytest.mark.parametrize("kind", [AUC, Precision, Recall])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([0, 2], [0.1, 0.2]), ValueError, r"y_true\[1\] is 2.0; labels are 0 and 1"),
        (([0, 1], [0.1, 1.5]), ValueError, r"y_pred\[1\] is 1.5; predictions are from 0 to 1"),
        (([[0, 1]], [[0.1, np.nan]]), ValueError, r"y_pred\[0, 1\] is nan"),
        (([0, 1], [[0.1], [0.2]]), ms.StructureError, r"y_pred \(2, 1\); .* y_pred\[:, 0\]"),
        (([0, 1], [0.1, 0.2], [1, -1]), ValueError, r"sample_weight\[1\] is -1"),
        (([0, 1], [0.1, 0.2], [1, 2, 3]), ms.StructureError, "sample_weight of shape"),
        (([0, 1j], [0.1, 0.2]), ms.LeafTypeError, "y_true has dtype complex128"),
    ],
)
def test_what_does_not_fit_changes_nothing(kind, arguments, error, words):
    metric = kind()
    with pytest.raises(error, match=words):
        metric.update_state(*arguments)
    assert not any(np.any(variable) for variable in metric.variables)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AUC(num_thresholds=1), "num_thresholds must be an integer"),
        (lambda: Precision(threshold=1.5), "threshold is 1.5; expected a number from 0 to 1"),
        (lambda: Recall(threshold="half"), "threshold is 'half'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("saved", "restored"), [(3, 2), (1, 3)])
def test_checkpoints_at_another_number_of_ranks(saved, restored, tmp_path):
    labels, predictions = np.arange(12) % 2, np.linspace(0, 1, 12) ** 2

    def save(comm):
        with ms.MirroredStrategy().scope():
            auc, recall = AUC(), Recall()
            rows = slice(comm.rank, None, saved)
            for metric in (auc, recall):
                ms.get_strategy().run(metric.update_state, args=(labels[rows], predictions[rows]))
            ms.Checkpoint(auc=auc, recall=recall).write(tmp_path / "state")
            return auc.result(), recall.result()

    def restore(comm):
        with ms.MirroredStrategy().scope():
            auc, recall = AUC(), Recall()
            ms.Checkpoint(auc=auc, recall=recall).read(tmp_path / "state").assert_consumed()
            return auc.result(), recall.result()

    area, _, recall = expected(labels, predictions, np.ones(12))
    for results in (run_ranks(save, saved), run_ranks(restore, restored)):
        for result in results:
            assert result == pytest.approx((area, recall), rel=1e-14)


def test_a_bad_label_on_one_rank_raises_on_all():
    def program(comm):
        with ms.MirroredStrategy().scope():
            auc = AUC()
            labels = np.array([0, 1 + comm.rank])
            with pytest.raises(ValueError, match=r"rank 1: AUC 'auc': y_true\[1\] is 2"):
                ms.get_strategy().run(auc.update_state, args=(labels, labels / 2))

    run_ranks(program, 2)
