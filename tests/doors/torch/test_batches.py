"""Datasets of PyTorch are divided over the ranks as arrays are."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402


class Squares(torch.utils.data.Dataset):
    """Rows of a tensor and the square of their number; notes what was read."""

    def __init__(self, count=10):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": torch.full((2,), float(index)), "y": index * index}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_reads_its_own_items_once(size):
    def program(comm):
        strategy, data = ms.MultiWorkerMirroredStrategy(), Squares()
        batches = mt.batches(data, strategy, batch_size=4, shuffle=True, seed=3)
        assert len(batches) == 3
        for _ in range(2):
            data.read.clear()
            found = list(batches)
            assert len(found) == 3
            rows = torch.cat([batch["x"] for batch in found])[:, 0].long()
            assert sorted(data.read) == sorted(rows.tolist())
            for batch in found:
                assert batch["x"].dtype is torch.float32 and batch["y"].dtype is torch.int64
                assert torch.equal(batch["x"][:, 0].long() ** 2, batch["y"])
            every = strategy.run(lambda: ms.get_replica_context().all_gather(rows, 0))  # noqa: B023
            assert sorted(every.tolist()) == list(range(10))
        return rows.tolist()

    run_ranks(program, size)


class Meeting(Squares):
    """For a batch of four, two items are read at a time, or the test fails."""

    def __init__(self):
        super().__init__(9)  # item 0 tells what an item is
        self.two = threading.Barrier(2, timeout=240)

    def __getitem__(self, index):
        if self.read:
            self.two.wait()
        return super().__getitem__(index)


def test_workers_read_beside_each_other():
    def program(comm):
        strategy = ms.MirroredStrategy()
        data = torch.utils.data.Subset(Meeting(), range(1, 9))
        found = list(mt.batches(data, strategy, batch_size=8, workers=2))
        assert len(found) == 1
        return found[0]["y"].tolist()

    assert run_ranks(program, 2) == [[1, 4, 9, 16], [25, 36, 49, 64]]
    with pytest.raises(ms.DataError, match=r"workers=2 read the items.*tuple"):
        mt.batches((np.arange(4),), ms.OneDeviceStrategy("cpu"), batch_size=2, workers=2)


def test_it_is_a_source_of_a_dataset_with_all_its_steps():
    dataset = ms.Dataset(Squares()).map(lambda item: item["x"].sum()).batch(4)
    assert [batch.tolist() for batch in dataset] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


def test_other_sources():
    strategy = ms.OneDeviceStrategy("cpu")
    pairs = torch.utils.data.TensorDataset(torch.arange(4.0), torch.arange(4))
    for data in (
        pairs,
        (torch.arange(4.0), np.arange(4)),
        ms.Dataset((np.arange(4.0), np.arange(4))),
    ):
        (x, y), *_ = mt.batches(data, strategy, batch_size=3)
        assert x.tolist() == y.tolist() == [0, 1, 2]
    with pytest.raises(ms.errors.DataError, match="has no items"):
        mt.batches(Squares(0), strategy, batch_size=3)
    texts = torch.utils.data.Subset(["a", "b"], [0, 1])
    with pytest.raises(ms.errors.DataError, match="is text"):
        ms.Dataset(texts)
    sizes = torch.utils.data.Subset([torch.ones(1), torch.ones(1), torch.ones(2)], [0, 1, 2])
    with pytest.raises(ms.errors.DataError, match=r"item 2 of Subset has shape \(2,\).*collate_fn"):
        list(mt.batches(sizes, strategy, batch_size=3))


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(9))


def test_a_loader_that_shuffles_is_refused_and_one_that_does_not_is_a_source():
    data = torch.utils.data.TensorDataset(torch.arange(9.0)[:, None])
    strategy = ms.OneDeviceStrategy("cpu")
    with pytest.raises(ms.DataError, match="has one order on all ranks"):
        mt.batches(torch.utils.data.DataLoader(data, 4, shuffle=True), strategy)
    divides = torch.utils.data.DistributedSampler(data, 2, 0)
    with pytest.raises(ms.DataError, match="divided twice"):
        mt.batches(torch.utils.data.DataLoader(data, 4, sampler=divides), strategy)
    with pytest.raises(ms.DataError, match="each rank would read all"):
        mt.batches(torch.utils.data.DataLoader(Endless(), 4), strategy)
    with pytest.raises(ms.DataError, match=r"num_workers=2.*must not fork.*workers=2\)"):
        mt.batches(torch.utils.data.DataLoader(data, 4, num_workers=2), strategy)
    loader = torch.utils.data.DataLoader(data, 4)
    with pytest.raises(ms.DataError, match=r"makes batches of 4 already.*batch_size=8"):
        mt.batches(loader, strategy, batch_size=8)
    assert [len(x) for (x,) in mt.batches(loader, strategy)] == [4, 4, 1]
    # Its loader has a length, which it does not know.
    alike = ms.Dataset(torch.utils.data.DataLoader(Endless(), 4))
    assert [len(x) for x in mt.batches(alike, strategy)] == [4, 4, 1]


@pytest.mark.parametrize("data", [Squares(), (np.arange(4.0),), np.arange(4.0)])
def test_rows_without_a_batch_size_are_asked_for_it(data):
    with pytest.raises(ms.DataError, match="how many rows do all ranks together get"):
        mt.batches(data, ms.OneDeviceStrategy("cpu"))
