"""What do the rows of an epoch cost that are read from files, in order and shuffled?

Run it with ``python benchmarks/shuffling.py``. Each figure is CPU time (of this process, that of
the kernel for it included) of one epoch; files are in the page cache, so a disk would come on top.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat as ms

ROWS, WIDTH, CHUNK, BATCH = 65536, 64, 512, 64  # rows of float32; rows of a chunk and of a batch


def table(rows: int) -> Any:
    return np.random.default_rng(0).integers(0, 16, (rows, WIDTH)).astype(np.float32)


def memmap(data: Any, folder: Path) -> Any:
    np.save(folder / "x.npy", data)
    return np.load(folder / "x.npy", mmap_mode="r")


def hdf5(data: Any, folder: Path) -> Any:
    import h5py

    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(CHUNK, WIDTH), compression="gzip")
    return h5py.File(folder / "x.h5")["x"]


def zarr(data: Any, folder: Path) -> Any:
    import zarr

    array = zarr.create_array(folder / "x.zarr", data=data, chunks=(CHUNK, WIDTH))
    return zarr.open_array(array.store, mode="r")


def parquet(data: Any, folder: Path) -> Callable[[str], Any]:
    """Return a function that reads a row group by its number."""
    import pyarrow
    import pyarrow.parquet

    columns = {f"c{i}": column for i, column in enumerate(data.T)}
    path = folder / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=CHUNK)
    file = pyarrow.parquet.ParquetFile(path)

    def read(group: str) -> Any:
        table = file.read_row_group(int(group))
        return np.stack([table[name].to_numpy() for name in table.column_names], axis=1)

    return read


def datasets(source: Any, rows: int) -> Iterator[tuple[str, ms.Dataset]]:
    """Iterate over the ways to go through a source, each with its name."""
    if callable(source):
        groups = ms.Dataset.from_files([str(i) for i in range(rows // CHUNK)], source)
        yield "in order", groups.rebatch(BATCH)
        yield "blocks shuffled", groups.shuffle(seed=1).rebatch(BATCH)
    else:
        examples = ms.Dataset(source)
        yield "in order", examples.batch(BATCH)
        yield "blocks shuffled", examples.batch(CHUNK).shuffle(seed=1).rebatch(BATCH)
        yield "rows shuffled", examples.shuffle(seed=1).batch(BATCH)


def seconds(dataset: ms.Dataset, total: float) -> float:
    """Return the CPU time of an epoch; check that all rows came."""
    begin = time.process_time()
    found_total = sum(float(batch.sum(dtype=np.float64)) for batch in dataset)
    cpu_seconds = time.process_time() - begin
    assert found_total == total
    return cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    quick = parser.parse_args().quick
    data = table(4 * CHUNK if quick else ROWS)
    print(f"{len(data)} rows of {WIDTH * 4} bytes, chunks of {CHUNK} rows, batches of {BATCH}")
    print(f"{'format':8} {'order':16} {'us/row':>8} {'x in order':>10}")
    makers = {"memmap": memmap, "h5py": hdf5, "zarr": zarr, "pyarrow": parquet}
    for name, make in makers.items():
        if name != "memmap" and importlib.util.find_spec(name) is None:
            print(f"{name:8} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            source, base_seconds = make(data, Path(folder)), 0.0
            for order, dataset in datasets(source, len(data)):
                cpu_seconds = seconds(dataset, float(data.sum(dtype=np.float64)))
                base_seconds = base_seconds or cpu_seconds
                row_microseconds = 1e6 * cpu_seconds / len(data)
                ratio = cpu_seconds / base_seconds
                print(f"{name:8} {order:16} {row_microseconds:8.2f} {ratio:10.1f}", flush=True)


if __name__ == "__main__":
    main()
