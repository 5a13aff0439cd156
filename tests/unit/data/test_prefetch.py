"""Reading ahead: order, errors, depth, and threads that end."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from mpistrat.data.dataset import Dataset
from mpistrat.data.iterators import prefetch_elements
from mpistrat.data.sources import ReadIterator
from mpistrat.errors import DataError

pytestmark = pytest.mark.usefixtures("quick_collections")


def threads():
    return [t for t in threading.enumerate() if t.name == "mpistrat-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    gc.collect()
    assert wait_for(lambda: not threads()), f"still alive: {threads()}"


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_gives_the_same_elements(depth, count):
    assert list(prefetch_elements(iter(range(count)), depth)) == list(range(count))


def test_a_negative_depth_is_refused_at_the_call():
    with pytest.raises(DataError, match="at least 0, not -1"):
        prefetch_elements([], -1)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3), KeyError("x")])
def test_errors_come_at_their_element(depth, error):
    def elements():
        yield 1
        yield 2
        raise error

    iterator = prefetch_elements(elements(), depth)
    assert [next(iterator), next(iterator)] == [1, 2]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    # A sys.exit is called once more, where it may end the program.
    assert caught.value is error or (depth and caught.value.args == error.args == (3,))
    if depth:
        for _ in range(2):  # never a StopIteration, which would look like the end
            with pytest.raises(DataError, match=r"has failed .*make a new one"):
                next(iterator)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_can_be_read_after_an_error_is(depth):
    reads = ReadIterator(iter([2, 0, 4]), lambda number: 8 // number)
    iterator = prefetch_elements(reads, depth)
    assert next(iterator) == 4
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert list(iterator) == [2]
    assert list(iterator) == []


def test_errors_of_iter_come_too():
    with pytest.raises(TypeError, match="not iterable"):
        next(prefetch_elements(3, 1))


@pytest.mark.parametrize("depth", [1, 3])
def test_is_at_most_depth_elements_ahead(depth):
    made = []

    def elements():
        for i in range(20):
            made.append(i)
            yield i

    iterator = prefetch_elements(elements(), depth)
    assert next(iterator) == 0
    assert wait_for(lambda: len(made) == 1 + depth)
    time.sleep(0.05)
    assert len(made) == 1 + depth
    iterator.close()


def test_works_ahead_while_the_consumer_is_busy():
    mapped = []
    dataset = Dataset.range(4).batch(1).map(lambda x: mapped.append(int(x[0])) or x).prefetch(4)
    iterator = iter(dataset)
    assert next(iterator).tolist() == [0]
    assert wait_for(lambda: mapped == [0, 1, 2, 3])
    assert [x.tolist() for x in iterator] == [[1], [2], [3]]


@pytest.mark.parametrize("how", ["close", "drop", "break", "cycle"])
def test_the_thread_ends_when_the_consumer_does(how):
    closed = threading.Event()

    def elements():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    iterator = prefetch_elements(elements(), 2)
    assert next(iterator) == 1
    (thread,) = threads()
    assert thread.daemon
    if how == "close":
        iterator.close()
    elif how == "cycle":
        box = [iterator]
        box.append(box)
        del iterator, box
        gc.collect()
    elif how == "break":
        for _ in iterator:
            break
        del iterator
    else:
        del iterator
    assert wait_for(lambda: not thread.is_alive())
    assert closed.is_set()


def test_the_iterator_it_reads_is_closed_though_others_hold_it():
    def elements():
        yield 1
        yield 2

    source = elements()
    iterator = prefetch_elements(source, 1)
    assert next(iterator) == 1
    iterator.close()
    assert wait_for(lambda: not threads())
    assert next(source, "closed") == "closed"


def test_an_iterator_nobody_asks_starts_no_thread():
    iterator = iter(Dataset.range(3).batch(1).prefetch(2))
    assert not threads()
    del iterator


def test_the_thread_ends_with_the_elements():
    iterator = prefetch_elements(range(3), 5)
    next(iterator)
    assert wait_for(lambda: not threads())
    assert list(iterator) == [1, 2]


def test_runs_in_one_other_thread_with_the_callers_context():
    seen = []

    def look(x):
        seen.append((threading.get_ident(), np.geterr()["divide"]))
        return x

    with np.errstate(divide="raise"):
        list(Dataset.range(6).batch(2).map(look).prefetch(2))
    assert len(set(seen)) == 1
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == "raise"


def test_datasets_with_and_without_prefetch_are_equal():
    plain = Dataset.range(50).shuffle(seed=2).batch(7).map(np.negative)
    ahead = plain.prefetch(3)
    assert (plain._prefetch_depth, ahead._prefetch_depth, ahead.repeat(2)._prefetch_depth) == (
        0,
        3,
        3,
    )
    assert ahead.prefetch(0)._prefetch_depth == 0
    for _ in range(2):
        assert [x.tolist() for x in plain] == [x.tolist() for x in ahead]


def test_pieces_can_be_cut_ahead():
    dataset = Dataset.range(50).shuffle(seed=2).batch(7).prefetch(3)

    def parts(depth):
        cuts = (piece.read_part(1, 3) for piece in dataset._iterate_lazy_batches(0, []))
        return [part.tolist() for part in prefetch_elements(cuts, depth)]

    assert parts(dataset._prefetch_depth) == parts(0)


def test_generators_that_refill_one_buffer_are_safe():
    def batches():
        buffer = np.zeros(2)
        for i in range(6):
            buffer[:] = i
            yield buffer

    assert [x.tolist() for x in Dataset(batches).prefetch(4)] == [[i, i] for i in range(6)]


def test_after_an_error_in_map_the_thread_ends_with_the_iterator():
    dataset = Dataset.range(9).batch(1).map(lambda x: x // (x != 3) if x != 3 else 1 / 0)
    iterator = iter(dataset.prefetch(2))
    assert [next(iterator).tolist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
