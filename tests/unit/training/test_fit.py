"""`fit`: the loop by hand has its bits; saved, stopped and continued at other numbers of ranks."""

from __future__ import annotations

import csv
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CheckpointError, DataError, StructureError
from mpistrat.testing import RanksFailed, run_ranks

X = np.random.default_rng(0).standard_normal((37, 3))
Y = X @ np.array([1.0, -2.0, 0.5])
DATA = ms.Dataset(np.arange(8.0))
CURE_OF_ARRAYS = r"Make a dataset of arrays: ms\.Dataset\(\(x, y\)\)\.batch\(64\)"
BATCH, EPOCHS = 8, 4
STEPS = -(-len(X) // BATCH)


class Program:
    """Least squares on one strategy: variables, optimizer, and replica functions."""

    def __init__(self, comm, batch=BATCH):
        self.strategy = ms.MirroredStrategy(comm=comm)
        with self.strategy.scope():
            self.w = ms.Variable(np.zeros(3), name="w")
            self.optimizer = ms.optim.Adam(0.05)
            self.optimizer.build([self.w])
        self.data = ms.Dataset((X, Y)).shuffle(seed=0).batch(batch)
        self.state = {"w": self.w, "optimizer": self.optimizer}
        self.validations, self.rows = 0, []

    def on_epoch(self, run):
        self.rows.append(run.epoch)

    def step(self, batch):
        x, y = batch
        error = x @ np.asarray(self.w) - y
        gradient = 2 * x.T @ error / max(len(y), 1)
        self.optimizer.apply_gradients([(gradient, self.w)], weight=len(y))
        return {"loss": error**2}

    def score(self, batch):
        x, y = batch
        self.validations += 1
        return {"loss": (x @ np.asarray(self.w) - y) ** 2}

    def fit(self, **arguments):
        arguments = {"epochs": EPOCHS, "state": self.state, "verbose": False} | arguments
        with self.strategy.scope():
            return ms.fit(self.step, self.data, **arguments)

    @property
    def bits(self):
        return self.w.numpy().tobytes()


def is_last(strategy):
    return strategy.rank == strategy.size - 1


class StopAt(Exception):
    """What ends a run in these tests."""


class Interrupt:
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step == self.step:
            raise StopAt


def by_hand(comm):
    """The same training without `fit`."""
    program = Program(comm)
    strategy, losses = program.strategy, []
    with strategy.scope():
        mean = ms.metrics.Mean("loss")
    for _ in range(EPOCHS):
        for batch in strategy.experimental_distribute_dataset(program.data):
            results = []
            strategy.run(lambda part, results=results: results.append(program.step(part)), (batch,))
            strategy.run(lambda results=results: mean.update_state(results[0]["loss"]))
        losses.append(mean.result())
        mean.reset_state()
    return program.bits, losses


def whole(comm):
    program = Program(comm)
    history = program.fit()
    return program.bits, history["loss"][1].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_loop_by_hand_gives_the_same_bits(size):
    assert run_ranks(whole, size) == run_ranks(by_hand, size)


def interrupted(comm, directory, every):
    program = Program(comm)
    with pytest.raises(StopAt):
        program.fit(directory=directory, callbacks=[Interrupt(13)], every=every)


def continued(comm, directory, every):
    program = Program(comm)
    history = program.fit(directory=directory, every=every)
    assert program.fit(directory=directory, every=every).table().shape == history.table().shape
    return program.bits, history["loss"][1].tolist(), history["loss"][0].tolist()


@pytest.mark.parametrize("every", ["2 steps", None, "4 steps"])
def test_an_interrupted_run_continues_to_the_same_bits(every, tmp_path):
    run_ranks(interrupted, 2, tmp_path, every)
    bits, losses, epochs = run_ranks(continued, 2, tmp_path, every)[0]
    assert (bits, losses) == run_ranks(whole, 2)[0]
    assert epochs == [1, 2, 3, 4]
    with (tmp_path / "history.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (3, 2)])
def test_another_number_of_ranks_continues_to_the_same_numbers(sizes, tmp_path):
    run_ranks(interrupted, sizes[0], tmp_path, "5 steps")
    bits, losses, _ = run_ranks(continued, sizes[1], tmp_path, "5 steps")[0]
    want_bits, want_losses = run_ranks(whole, 1)[0]
    np.testing.assert_allclose(np.frombuffer(bits), np.frombuffer(want_bits), rtol=1e-12)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-12)


def test_a_run_that_has_ended_goes_on_with_more_epochs(tmp_path):
    def program_of(comm, epochs):
        program = Program(comm)
        history = program.fit(directory=tmp_path, epochs=epochs)
        return program.bits, history["loss"][1].tolist()

    run_ranks(program_of, 2, 2)
    assert run_ranks(program_of, 2, EPOCHS) == run_ranks(whole, 2)


class TestRows:
    def test_rows_of_steps(self, tmp_path):
        def program_of(comm):
            program = Program(comm)
            validation = ms.Dataset((X, Y)).batch(16)
            arguments = {"validate": program.score, "validation_data": validation}
            history = program.fit(
                epochs=None, steps=9, validate_every="4 steps", directory=tmp_path, **arguments
            )
            assert program.validations == 3 * 3
            return {name: history[name][0].tolist() for name in history.names}

        names = run_ranks(program_of, 2)[0]
        assert set(map(tuple, names.values())) == {(4, 8, 9)}  # the last interval is not whole
        assert ms.latest_checkpoint(tmp_path).endswith("ckpt-3.npz")  # the end is saved too

    def test_an_endless_dataset_ends_with_its_steps(self):
        def program_of(comm):
            program = Program(comm)
            program.data = ms.Dataset((X, Y)).shuffle(seed=0).repeat().batch(BATCH)
            return program.fit(epochs=None, steps=7, validate_every="3 steps")["loss"][0].tolist()

        assert run_ranks(program_of, 2) == [[3, 6, 7]] * 2

    def test_every_second_epoch_is_validated(self):
        def program_of(comm):
            program = Program(comm)
            history = program.fit(
                validate=program.score,
                validation_data=ms.Dataset((X, Y)).batch(16),
                validate_every="2 epochs",
            )
            error = X @ program.w.numpy() - Y
            assert history.last("validation/loss") == pytest.approx(np.mean(error**2), rel=1e-12)
            return history["loss"][0].tolist(), history["validation/loss"][0].tolist()

        assert run_ranks(program_of, 3) == [([1, 2, 3, 4], [2, 4])] * 3

    def test_means_with_weights(self):
        def program_of(comm):
            program = Program(comm)

            def step(batch):
                losses = program.step(batch)["loss"]
                mean = losses.mean() if len(losses) else np.nan
                return {"loss": losses, "mean": (mean, len(losses))}

            with program.strategy.scope():
                history = ms.fit(
                    step,
                    program.data,
                    epochs=2,
                    state=program.state,
                    metrics=("loss", "mean"),
                    verbose=False,
                )
            return history["loss"][1], history["mean"][1]

        losses, means = run_ranks(program_of, 3)[0]
        np.testing.assert_allclose(losses, means, rtol=1e-13)


class TestTheBest:
    @staticmethod
    def stop_early(comm, directory, epochs=9):
        """Train with a monitored curve that is best in its third row."""
        program = Program(comm)
        bad = iter(range(99))

        def score(batch):
            del batch
            return {"badness": (abs(next(bad) // 3 - 2.0), 1)}  # three batches a validation

        history = program.fit(
            epochs=epochs,
            validate=score,
            validation_data=ms.Dataset((X, Y)).batch(16),
            monitor="validation/badness",
            patience=2,
            restore_best=True,
            directory=directory,
        )
        return program.bits, history["validation/badness"][1].tolist()

    def test_it_ends_when_it_gets_no_better_and_stays_ended(self, tmp_path):
        bits, values = run_ranks(self.stop_early, 2, tmp_path)[0]
        assert values == [2, 1, 0, 1, 2]
        assert run_ranks(self.stop_early, 2, tmp_path)[0] == (bits, values)
        assert bits == run_ranks(self.three_epochs, 2)[0]

    def test_it_says_why_it_ends_early_and_how_to_continue(self, tmp_path, capfd):
        reason = "validation/loss has had no new best value for 2 epochs; the best is that of epoch"

        def program_of(comm, epochs, values, patience):
            options = {"restore_best": True, "verbose": True, "patience": patience}
            return self.continue_run(comm, tmp_path, epochs, values, **options)

        run_ranks(program_of, 2, 9, [1.0, 2.0, 3.0], 2)
        lines = capfd.readouterr().out.splitlines()
        assert lines[3:] == [f"stops after epoch 3: {reason} 1 (restored)"]
        run_ranks(program_of, 2, 9, [], 2)
        assert capfd.readouterr().out.splitlines() == [
            f"the run in {tmp_path} ended early: {reason} 1; give a larger patience to continue it"
        ]
        run_ranks(program_of, 2, 6, [0.5, 4.0, 4.0], 4)
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == 4  # it has made all epochs
        assert lines[0].startswith("continues after step 15, as saved in ")
        run_ranks(program_of, 2, 6, [], 2)
        assert "has ended after step 30; give more epochs or" in capfd.readouterr().out
        run_ranks(program_of, 2, 9, [], 2)
        assert f"{reason} 4; give a larger patience" in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"validate_every": "2 epochs"}, "stops after epoch 4: {} for 2 epochs; {} epoch 2"),
            ({"validate_every": "3 steps"}, "stops after step 6: {} for 3 steps; {} step 3"),
        ],
    )
    def test_it_counts_epochs_or_steps(self, options, text, capfd):
        def program_of(comm):
            program, values = Program(comm), iter([1.0, 2.0])
            program.fit(
                validate=lambda batch: {"loss": (next(values), 1)},
                validation_data=ms.Dataset((X, Y)).batch(len(X)),
                patience=1,
                epochs=9,
                verbose=True,
                **options,
            )

        run_ranks(program_of, 2)
        text = text.format("validation/loss has had no new best value", "the best is that of")
        assert capfd.readouterr().out.splitlines()[-1] == text

    def test_it_says_that_all_values_were_nan(self, tmp_path, capfd):
        def program_of(comm):
            options = {"patience": 2, "verbose": True}
            self.continue_run(comm, tmp_path, 9, [np.nan, np.nan], **options)
            self.continue_run(comm, tmp_path, 9, [], **options)

        run_ranks(program_of, 1)
        lines, reason = capfd.readouterr().out.splitlines(), "validation/loss has had no value"
        assert lines[2:] == [
            f"stops after epoch 2: {reason} but NaN",
            f"the run in {tmp_path} ended early: {reason} but NaN; give a larger patience to "
            "continue it",
        ]

    @staticmethod
    def three_epochs(comm):
        program = Program(comm)
        program.fit(epochs=3)
        return program.bits

    def test_the_last_weights_stay_without_restore_best(self, tmp_path):
        def program_of(comm):
            program = Program(comm)
            program.fit(monitor="loss", mode="max", keep_best=True, directory=tmp_path)
            return program.bits

        assert run_ranks(program_of, 2)[0] == run_ranks(whole, 2)[0][0]
        assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == [
            "ckpt-1.npz",  # the first epoch has the highest loss
            "ckpt-3.npz",
            "ckpt-4.npz",
        ]
        manager = ms.CheckpointManager(
            ms.Checkpoint(w=ms.Variable(0.0)), tmp_path, 2, keep_best="loss", best_mode="max"
        )
        assert manager.best_checkpoint.endswith("ckpt-1.npz")

    @staticmethod
    def continue_run(comm, directory, epochs, values, **options):
        """Train to an epoch; the validation of each epoch has one of the values."""
        program = Program(comm)
        history = program.fit(
            epochs=epochs,
            validate=lambda batch: {"loss": (values[len(program.rows)], 1)},
            validation_data=ms.Dataset((X, Y)).batch(len(X)),
            callbacks=[program],
            directory=directory,
            **options,
        )
        return program.bits, history["validation/loss"][1].tolist()

    def test_a_best_row_without_a_checkpoint_is_an_error(self, tmp_path):
        def begin(comm):
            self.continue_run(comm, tmp_path, 2, [3.0, 2.0], keep_best=True)
            self.continue_run(comm, tmp_path, 5, [1.0, 4.0, 4.0], max_to_keep=1)

        def end(comm):
            text = "no checkpoint of the best row: the best row, with validation/loss 1, was made"
            with pytest.raises(CheckpointError, match=text):
                self.continue_run(comm, tmp_path, 6, [5.0], restore_best=True)

        run_ranks(begin, 2)
        run_ranks(end, 2)

    def test_a_later_best_row_with_a_checkpoint_is_restored(self, tmp_path):
        def program_of(comm):
            self.continue_run(comm, tmp_path, 2, [3.0, 2.0])
            options = {"restore_best": True}
            return self.continue_run(comm, tmp_path, 4, [1.0, 4.0], **options)

        bits, values = run_ranks(program_of, 2)[0]
        assert values == [3.0, 2.0, 1.0, 4.0]
        assert bits == run_ranks(self.three_epochs, 2)[0]

    def test_a_curve_of_nan_has_no_best_row(self, tmp_path):
        def program_of(comm):
            with pytest.raises(CheckpointError, match="'validation/loss' has no value but NaN"):
                self.continue_run(comm, tmp_path, 2, [np.nan, np.nan], restore_best=True)

        run_ranks(program_of, 2)


class Counter:
    """A callback with state."""

    def __init__(self):
        self.count, self.epochs, self.paths = 0, [], []

    def on_step(self, run):
        self.count += 1

    def on_epoch(self, run):
        self.epochs.append((run.epoch, sorted(run.metrics)))

    def on_save(self, run, path):
        self.paths.append(path.rpartition("/")[2])

    def checkpoint_state(self):
        return {"count": self.count}

    def restore_state(self, state):
        self.count = state["count"]


def test_callbacks_and_their_state(tmp_path):
    def program_of(comm, epochs):
        counter = Counter()
        Program(comm).fit(directory=tmp_path, callbacks=[counter], epochs=epochs)
        return counter.count, counter.epochs, counter.paths

    assert run_ranks(program_of, 2, 1)[0] == (STEPS, [(1, ["loss"])], ["ckpt-1.npz"])
    want = (2 * STEPS, [(2, ["loss"])], ["ckpt-2.npz"])
    assert run_ranks(program_of, 2, 2)[0] == want


def test_a_callback_stops_the_run(tmp_path, capfd):
    class Stop:
        def on_step(self, run):
            if run.step == 7:
                run.stop()

    def program_of(comm, callbacks):
        program = Program(comm)
        program.fit(directory=tmp_path, callbacks=callbacks, verbose=True)
        return program.optimizer.iterations

    assert list(map(int, run_ranks(program_of, 2, [Stop()]))) == [7, 7]
    assert capfd.readouterr().out.splitlines()[1:] == ["stops after step 7: run.stop() was called"]
    assert list(map(int, run_ranks(program_of, 2, []))) == [7, 7]  # it stays stopped
    assert capfd.readouterr().out.splitlines() == [
        f"the run in {tmp_path} ended early: run.stop() was called; give another directory"
    ]


def test_the_loop_by_hand_reads_a_checkpoint_of_fit(tmp_path):
    def program_of(comm):
        program = Program(comm)
        program.fit(directory=tmp_path)
        other = Program(comm)
        with other.strategy.scope():
            checkpoint = ms.Checkpoint(**other.state, data=other.data, step=0)
            checkpoint.restore(ms.latest_checkpoint(tmp_path), partial=True)
        return program.bits == other.bits, checkpoint.step, other.data.epoch

    assert run_ranks(program_of, 2) == [(True, EPOCHS * STEPS, EPOCHS)] * 2


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"epochs": None}, ValueError, "give epochs=, or steps="),
            ({"validate_every": "often"}, ValueError, "'1 epoch' or '500 steps', got 'often'"),
            ({"mode": "low"}, ValueError, "'min' or 'max', got 'low'"),
            ({"keep_best": True}, ValueError, "need a directory"),
            ({"validate": abs}, ValueError, "both validate= and validation_data="),
            ({"metrics": "loss"}, TypeError, "metrics must be names"),
            ({"metrics": ("cost",)}, StructureError, "results named .*'loss'.*'cost'"),
            ({"state": {"step": 0}}, StructureError, "names \\['step'\\]"),
            ({"patience": 0}, ValueError, "patience"),
            ({"metrics": ("loss", "loss")}, ValueError, "different names"),
            ({"metrics": ("seconds",)}, ValueError, "which the history uses"),
            ({"metrics": ()}, ValueError, "different names"),
            ({"callbacks": [Interrupt]}, TypeError, "an object with one of the methods on_step"),
            ({"callbacks": [object()]}, TypeError, "an object with one of the methods on_step"),
            ({"callbacks": abs}, TypeError, "callbacks must be a list"),
            ({"state": [1]}, TypeError, "state must be a dict"),
            ({"monitor": "los", "patience": 1}, StructureError, "'los' is not a curve.*'loss'"),
        ],
    )
    def test_arguments(self, arguments, error, text):
        def program_of(comm):
            with pytest.raises(error, match=text):
                Program(comm).fit(**arguments)

        run_ranks(program_of, 2)

    @pytest.mark.parametrize(
        ("result", "error", "text"),
        [
            ({"loss": 0.5}, TypeError, "one number for 'loss'.*\\(mean, len\\(x\\)\\)"),
            ({"loss": [1.0, 2.0]}, TypeError, "a list for 'loss'"),
            ({"loss": (np.ones(4), 4)}, TypeError, "a pair for 'loss' with shapes \\(4,\\)"),
            ({"loss": np.ones(1)}, StructureError, "1 rows for 'loss'.* has 4"),
            ({"loss": np.ones((4, 4))}, StructureError, "shape \\(4, 4\\).* 4 rows.*y\\[:, 0\\]"),
            ({"loss": np.ones((4, 2))}, StructureError, "shape \\(4, 2\\).*\\.mean\\(axis=1\\)"),
            (None, TypeError, "must return a dict"),
            (0.5, TypeError, "must return a dict"),
        ],
    )
    def test_results(self, result, error, text):
        def program_of(comm):
            program = Program(comm)
            with program.strategy.scope(), pytest.raises(error, match=text):
                ms.fit(lambda batch: result, program.data, epochs=1, state={}, verbose=False)

        run_ranks(program_of, 2)

    def test_data_without_batches(self):
        def program_of(comm):
            program = Program(comm)
            program.data = ms.Dataset((X, Y))
            with pytest.raises(DataError, match=r"single examples. Call batch\(global_batch"):
                program.fit()

        run_ranks(program_of, 2)

    def test_other_settings(self, tmp_path):
        def program_of(comm, rate):
            Program(comm).fit(directory=tmp_path, settings={"rate": rate}, epochs=1)

        run_ranks(program_of, 2, 0.1)
        with pytest.raises(Exception, match=r"begun with rate=0\.1, not 0\.2"):
            run_ranks(program_of, 2, 0.2)


class TestEvaluation:
    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_means_and_predictions(self, size):
        def program_of(comm):
            program = Program(comm)
            data = ms.Dataset((X, Y)).batch(BATCH)
            with program.strategy.scope():
                means = ms.evaluate(program.score, data)
                rows = ms.predict(lambda batch: {"x": batch[0], "sum": batch[0].sum(1)}, data)
            return means["loss"], rows["x"].tobytes(), rows["sum"].tobytes()

        want = (pytest.approx(np.mean(Y**2), rel=1e-13), X.tobytes(), X.sum(1).tobytes())
        assert run_ranks(program_of, size) == [want] * size

    def test_no_batch_and_no_end(self):
        def program_of(comm):
            strategy = ms.MirroredStrategy(comm=comm)
            empty = ms.Dataset(np.zeros((0, 2))).batch(2)
            endless = ms.Dataset(np.zeros((4, 2))).repeat().batch(2)
            with strategy.scope():
                for call in (ms.evaluate, ms.predict):
                    with pytest.raises(DataError, match="has no batch"):
                        call(lambda batch: {"loss": batch}, empty)
                    with pytest.raises(DataError, match="has no end"):
                        call(lambda batch: {"loss": batch}, endless)
            program = Program(comm)
            program.data = ms.Dataset((X, Y)).repeat().batch(BATCH)
            with pytest.raises(ValueError, match="epochs= never ends"):
                program.fit()
            with pytest.raises(ValueError, match="validate_every='500 steps'"):
                program.fit(epochs=None, steps=3)

        run_ranks(program_of, 2)

    @pytest.mark.parametrize(
        "make_data",
        [
            lambda strategy: DATA.shuffle(seed=1).batch(4),
            lambda strategy: DATA.batch(4).shuffle(seed=1),
            lambda strategy: DATA.shuffle(seed=1).batch(4).repeat(2),
            lambda strategy: strategy.experimental_distribute_dataset(
                DATA.shuffle(seed=1).batch(4)
            ),
            lambda strategy: strategy.distribute_datasets_from_function(
                lambda _: DATA.batch(2).shuffle(seed=1) if is_last(strategy) else DATA.batch(2)
            ),
        ],
    )
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_predictions_of_a_shuffled_dataset(self, make_data, size):
        def program_of(comm):
            strategy = ms.MirroredStrategy(comm=comm)
            data = make_data(strategy)
            with strategy.scope(), pytest.raises(DataError, match=r"Leave out shuffle\(\)"):
                ms.predict(lambda batch: batch, data)

        run_ranks(program_of, size)

    def test_predictions_of_shuffled_tensors(self):
        torch = pytest.importorskip("torch")
        import mpistrat.torch

        def program_of(comm):
            strategy = ms.MirroredStrategy(comm=comm)
            data = mpistrat.torch.batches(torch.zeros(8, 1), strategy, batch_size=4, shuffle=True)
            with strategy.scope(), pytest.raises(DataError, match=r"Leave out shuffle\(\)"):
                ms.predict(lambda batch: batch, data)

        run_ranks(program_of, 2)

    @pytest.mark.parametrize("data", [X, (X, Y), {"x": X}, [X, Y]])
    def test_arrays_in_place_of_a_dataset(self, data):
        def program_of(comm):
            program = Program(comm)
            program.data = data
            with program.strategy.scope():
                for call in (
                    program.fit,
                    lambda: ms.evaluate(program.score, data),
                    lambda: ms.predict(program.score, data),
                ):
                    with pytest.raises(DataError, match=CURE_OF_ARRAYS) as caught:
                        call()
                    assert "0." not in str(caught.value)  # no number of the array

        run_ranks(program_of, 2)

    def test_a_loader_in_place_of_a_dataset(self):
        torch = pytest.importorskip("torch")
        loader = torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=4)

        def program_of(comm):
            strategy, cure = ms.MirroredStrategy(comm=comm), r"mpistrat\.torch\.batches"
            with strategy.scope(), pytest.raises(DataError, match=f"DataLoader.*{cure}"):
                ms.evaluate(lambda batch: {}, loader)

        run_ranks(program_of, 2)

    def test_predictions_without_a_row_for_each(self):
        def program_of(comm):
            strategy = ms.MirroredStrategy(comm=comm)
            data = ms.Dataset(np.arange(5.0)).batch(2 * comm.size)
            with strategy.scope(), pytest.raises(StructureError, match=r"shape \(1,\) for 2 rows"):
                ms.predict(lambda batch: batch.sum(keepdims=True), data)

        run_ranks(program_of, 2)


def test_a_step_costs_few_calls_more_than_the_loop_by_hand():
    marks, calls = [], 0

    def count(frame, event, argument):
        nonlocal calls
        del frame, argument
        calls += event == "call"

    class Mark:
        def on_step(self, run):
            marks.append(calls)

    def profiled(call):
        marks.clear()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
        return np.diff(marks)[5]  # what is made once was made by then

    program = Program(None, batch=2)
    with program.strategy.scope():
        mean = ms.metrics.Mean("loss")
    batches = program.strategy.experimental_distribute_dataset(program.data)

    def body(batch):
        mean.update_state(program.step(batch)["loss"])

    def loop():
        for batch in batches:
            program.strategy.run(body, args=(batch,))
            marks.append(calls)

    by_hand = profiled(loop)
    assert profiled(lambda: program.fit(epochs=1, callbacks=[Mark()])) <= by_hand + 20


def test_rows_as_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboardX", reason="wants tensorboardX")

    def program_of(comm):
        Program(comm).fit(epochs=2, callbacks=[ms.TensorBoard(tmp_path / "events")])

    run_ranks(program_of, 2)
    (path,) = (tmp_path / "events").iterdir()  # of the first rank only
    assert path.read_bytes().count(b"loss") == 2


def test_one_rank_needs_no_strategy(tmp_path):
    w = ms.Variable(np.zeros(3))

    def step(batch):
        x, y = batch
        error = x @ w.numpy() - y
        w.assign_sub(0.2 * x.T @ error / len(y))
        return {"loss": error**2}

    data = ms.Dataset((X, Y)).shuffle(seed=0).batch(BATCH)
    arguments = {"state": {"w": w}, "verbose": False, "directory": tmp_path}
    tests = {"validate": lambda batch: {"rows": batch[1]}, "validation_data": data}
    history = ms.fit(step, data, epochs=2, **arguments, **tests)
    assert history["loss"][0].tolist() == [1, 2]
    assert ms.fit(step, data, epochs=3, **arguments, **tests)["loss"][0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [2, 3])
def test_the_training_data_may_be_the_validation_data(size):
    def program_of(comm):
        program = Program(comm)
        history = program.fit(validate=program.score, validation_data=program.data)
        bits = program.bits
        assert program.data.epoch == EPOCHS
        with program.strategy.scope():
            ms.evaluate(program.score, program.data)
            assert program.data.epoch == EPOCHS
            program.data = program.strategy.experimental_distribute_dataset(program.data)
            with pytest.raises(DataError, match="would count as an epoch"):
                program.fit(validate=program.score, validation_data=program.data)
        return bits, history["loss"][1].tolist()

    assert run_ranks(program_of, size) == run_ranks(whole, size)


def test_nan_is_never_the_best(tmp_path):
    def program_of(comm):
        program = Program(comm)
        values = iter([2.0, 1.0, np.nan, np.nan, np.nan, 0.5])
        rows = {}

        def score(batch):
            rows["value"] = next(values) if rows.setdefault("count", 0) % 3 == 0 else rows["value"]
            rows["count"] += 1
            return {"loss": (rows["value"], 1)}

        history = program.fit(
            epochs=9,
            validate=score,
            validation_data=ms.Dataset((X, Y)).batch(16),
            patience=3,
            keep_best=True,
            directory=tmp_path,
        )
        return history["loss"][0].tolist()

    assert run_ranks(program_of, 2) == [[1, 2, 3, 4, 5]] * 2
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == [
        "ckpt-2.npz",
        "ckpt-4.npz",
        "ckpt-5.npz",
    ]


def test_another_interval_of_validations_is_refused(tmp_path):
    def program_of(comm, interval):
        Program(comm).fit(directory=tmp_path, validate_every=interval, epochs=2)

    run_ranks(program_of, 2, "1 epoch")
    with pytest.raises(Exception, match="begun with validate_every='1 epoch', not '2 step'"):
        run_ranks(program_of, 2, "2 steps")


class TestAnotherProgram:
    """A run that is continued by a program with other objects."""

    def test_a_metric_more_is_refused_with_what_to_do(self, tmp_path):
        def program_of(comm, *names):
            Program(comm).fit(directory=tmp_path, epochs=1, metrics=names)

        run_ranks(program_of, 2, "loss")
        with pytest.raises(RanksFailed) as caught:
            run_ranks(program_of, 2, "loss", "accuracy")
        text = str(caught.value)
        assert "was begun with other state, metrics or callbacks" in text
        assert "'metrics/accuracy/count' is not in the file" in text
        assert "ckpt-1.npz', partial=True) before fit" in text

    def test_its_weights_are_a_start_for_another_run(self, tmp_path):
        def program_of(comm, path=None):
            program = Program(comm)
            if path is not None:
                ms.Checkpoint(w=program.w, optimizer=program.optimizer).restore(path, partial=True)
                return program.bits
            program.fit(directory=tmp_path, epochs=2)
            return program.bits

        bits = run_ranks(program_of, 2)
        assert run_ranks(program_of, 2, ms.latest_checkpoint(tmp_path)) == bits
