"""What makes a dataset of ``tf.data`` from the elements of others, or of a generator.

Examples, the elements before ``batch``, are read once, when the method is called, and are arrays
from then on: so what comes after may shuffle, divide and resume as with any arrays. Batches are
read again in each epoch. Either way each rank reads all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.compat.tf_tensors import TensorSpec, constant, shaped
from mpistrat.data.dataset import Dataset
from mpistrat.data.pieces import LazyBatch, Order
from mpistrat.data.pipeline import Examples
from mpistrat.data.steps import ArrangingStep, BatchMaker, EpochPath, Seeds
from mpistrat.errors import DataError, RefusedError

_MAX_GENERATED_NBYTES = 1 << 30  # bytes that are taken from a generator


def zipped(kind: type[Dataset], tree: Any) -> Dataset:
    """Return a dataset of trees of the elements of several; it ends with the shortest."""
    datasets, structure = pytree.flatten(tree)
    if (
        not datasets
        or not all(isinstance(dataset, Dataset) for dataset in datasets)
        or _lists(tree)
    ):
        raise TypeError(
            f"Dataset.zip wants datasets, a tuple or a dict of them, not a list, got {tree!r:.60}. "
            "Arrays make one dataset: Dataset.from_tensor_slices((x, y))."
        )
    if len({dataset.batched for dataset in datasets}) > 1:
        raise DataError(
            "Dataset.zip and enumerate: some give batches and others examples, which cannot be "
            "divided between replicas together. Call them before batch; to number batches, write "
            "Python's own enumerate(dataset)."
        )
    if datasets[0].batched:
        streams = [_stream(dataset, "zip") for dataset in datasets]

        def batches() -> Iterator[Any]:
            for parts in zip(*(stream() for stream in streams), strict=False):
                yield pytree.unflatten(structure, [*parts])

        return kind(batches)
    ends = [dataset.cardinality() for dataset in datasets]
    count = min((end for end in ends if end != Dataset.INFINITE), default=Dataset.INFINITE)
    limited_datasets = [
        Dataset.take(dataset, count) if count >= 0 else dataset for dataset in datasets
    ]
    if count and any(_is_mapped(dataset) for dataset in limited_datasets):
        elements = zip(*(_stream(dataset, "zip")() for dataset in limited_datasets), strict=True)
        return _joined(
            kind, [_row(pytree.unflatten(structure, [*element])) for element in elements]
        )
    return kind(
        pytree.unflatten(structure, [rows_of(dataset, "zip") for dataset in limited_datasets])
    )


def concatenated(first: Dataset, second: Any) -> Dataset:
    """Return the elements of one dataset, then those of another of the same structure."""
    if not isinstance(second, Dataset) or first.batched != second.batched:
        kind = "batches" if first.batched else "examples, before batch"
        raise TypeError(
            f"Dataset.concatenate wants another dataset of {kind}, as this one is; got "
            f"{second!r:.60}."
        )
    if first.batched:
        specs = [first.element_spec, second.element_spec]
        if None not in specs:  # else only reading could tell
            _of_one_kind(_same_dtype, specs)
        return _chained(type(first), (first, second), "concatenate")
    return _together(type(first), [first, second], "concatenate")


@final
@dataclasses.dataclass(frozen=True)
class Cached(ArrangingStep):
    """The order of the first epoch, in each epoch and repetition."""

    def cardinality(self, before: int) -> int:
        """Return the same number."""
        return before

    def transform_order(
        self, before: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return the rows of the first epoch."""
        return before((0,))

    def transform_batches(
        self, before: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the batches of the first epoch."""
        return before((0,))


def cached(dataset: Dataset) -> Dataset:
    """Return the elements in the order of the first epoch, if shuffles have seeds."""
    return dataset if dataset._seed_count else dataset._add_step(Cached())


def flat_mapped(dataset: Dataset, fn: Callable[..., Any]) -> Dataset:
    """Return the elements of all datasets that `fn` makes of the elements of one."""
    mapped_datasets = [
        _of(fn, element) for element in _stream(_counted(dataset, "flat_map"), "flat_map")()
    ]
    if not mapped_datasets:
        raise DataError(
            "Dataset.flat_map: the dataset has no elements, so what the function makes of them is "
            "not known."
        )
    if not all(isinstance(mapped_dataset, Dataset) for mapped_dataset in mapped_datasets):
        raise TypeError("Dataset.flat_map wants a function that returns datasets.")
    if mapped_datasets[0].batched:
        return _chained(type(dataset), mapped_datasets, "flat_map")
    return _together(type(dataset), mapped_datasets, "flat_map")


def chosen(dataset: Dataset, predicate: Callable[..., Any], method_name: str) -> Dataset:
    """Return the elements for which `predicate` is true; ``take_while`` ends at another."""
    choose: Any = itertools.takewhile if method_name == "take_while" else filter
    stream = _stream(dataset, method_name)

    def fits(element: Any) -> bool:
        truth_value = np.asarray(_of(predicate, element))
        if truth_value.dtype != bool or truth_value.ndim:
            raise ValueError(
                f"Dataset.{method_name}: the predicate must return one truth value, such as x > 0 "
                f"of a number or tf.reduce_all(x > 0), got {truth_value!r:.60}."
            )
        return bool(truth_value)

    if dataset.batched:
        return type(dataset)(lambda: choose(fits, stream()))
    elements = [*stream()]
    kept_rows = [_row(element) for element in choose(fits, elements)]
    template = _row(elements[0]) if elements else rows_of(dataset, method_name)
    return _joined(type(dataset), kept_rows or [pytree.map(lambda leaf: leaf[:0], template)])


def unbatched(dataset: Dataset) -> Dataset:
    """Return the rows of all elements."""
    if dataset.batched:
        return _joined(type(dataset), [*_stream(_counted(dataset, "unbatch"), "unbatch")()])
    examples = [*_stream(dataset, "unbatch")()] if _is_mapped(dataset) else []
    if examples and all(map(np.ndim, pytree.flatten(examples)[0])):
        return _joined(type(dataset), examples)
    rows = rows_of(dataset, "unbatch")
    if any(array.ndim == 1 for array in pytree.flatten(rows)[0]):
        raise ValueError("Dataset.unbatch: elements that are numbers have no rows.")
    return type(dataset)(pytree.map(lambda array: array.reshape(-1, *array.shape[2:]), rows))


def specs(types: Any, shapes: Any) -> Any:
    """Return a tree of `TensorSpec` of a tree of dtypes and one of shapes.

    Example:
      >>> specs(("int32", "float32"), ([], [None]))[1].shape
      (None,)
    """
    if isinstance(types, tuple | Mapping):
        parts = {key: specs(types[key], shapes[key]) for key in _keys(types)}
        return parts if isinstance(types, Mapping) else tuple(parts.values())
    return TensorSpec(shapes, types)


def generated(kind: type[Dataset], generator: Any, args: Any, types: Any) -> Dataset:
    """Return a dataset of what a generator gives, which has to end.

    Args:
      kind: The class of the result.
      generator: The function that returns it.
      args: What it is called with.
      types: A tree of dtypes or of `TensorSpec`; None for the dtypes that come.

    Raises:
      TypeError: The function is none, or an element has another structure than `types`.
      DataError: It does not end before 1 GiB; or its elements differ in structure, or are none.
      ValueError: One has not the shape of its `TensorSpec`.
    """
    if not callable(generator):
        raise TypeError(
            f"Dataset.from_generator wants a function that returns an iterable, got "
            f"{generator!r:.60}."
        )
    elements: list[Any] = []
    nbytes = 0
    for element in generator(*args):
        elements.append(_typed(element, types))
        nbytes += sum(leaf.nbytes + 16 for leaf in pytree.flatten(elements[-1])[0])
        if nbytes > _MAX_GENERATED_NBYTES:
            raise DataError(
                "Dataset.from_generator reads all elements once, and after 1 GiB the generator has "
                "not ended. Give mpistrat.Dataset.from_batches a function that yields batches."
            )
    if not elements:
        raise DataError("Dataset.from_generator: the generator gives no elements.")
    try:
        if len({tuple(map(np.shape, pytree.flatten(element)[0])) for element in elements}) > 1:
            return _joined(kind, [_row(element) for element in elements])
        return kind(pytree.map(lambda *leaves: np.stack(leaves), *elements))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Dataset.from_generator: the elements do not fit together ({error}). Give each the "
            "same structure and dtypes; say both by output_signature."
        ) from error


def rows_of(dataset: Dataset, method_name: str) -> Any:
    """Return all examples, joined along a new first axis."""
    count = count_of(dataset, method_name)
    if count:
        (rows,) = Dataset.batch(dataset, count)
        return rows
    spec = dataset.element_spec
    if spec is None:
        raise DataError(
            f"Dataset.{method_name}: a dataset has no elements, so their structure is not known."
        )
    return pytree.map(lambda leaf_spec: np.empty((0, *leaf_spec.shape), leaf_spec.dtype), spec)


def count_of(dataset: Dataset, method_name: str) -> int:
    """Return the number of elements; 0 if nobody knows it."""
    return max(_counted(dataset, method_name).cardinality(), 0)


def _counted(dataset: Dataset, method_name: str) -> Dataset:
    if dataset.cardinality() == Dataset.INFINITE:
        raise DataError(f"Dataset.{method_name} reads all elements, so call repeat() after it.")
    return _ordered(dataset, method_name)


def _ordered(dataset: Dataset, method_name: str) -> Dataset:
    if dataset._seed_count:
        raise RefusedError(
            f"Dataset.{method_name} after shuffle() without a seed is refused, as each rank would "
            "have an order of its own. Shuffle after it, or write shuffle(n, seed=7)."
        )
    return dataset


def _stream(dataset: Dataset, method_name: str) -> Callable[[], Iterator[Any]]:
    """Return what iterates over the elements, in the order of the first epoch.

    Batches may have no end, as they are read when they are asked for.
    """
    level = (_ordered if dataset.batched else _counted)(dataset, method_name)._pipeline
    return lambda: level.iterate_elements((), (0,))


def _chained(kind: type[Dataset], datasets: Iterable[Dataset], method_name: str) -> Dataset:
    streams = [_stream(dataset, method_name) for dataset in datasets]
    return kind(lambda: itertools.chain.from_iterable(stream() for stream in streams))


def _together(kind: type[Dataset], datasets: list[Dataset], method_name: str) -> Dataset:
    nonempty_datasets = [dataset for dataset in datasets if dataset.cardinality()]
    return _joined(
        kind,
        [
            part
            for dataset in nonempty_datasets or datasets[:1]
            for part in _parts(dataset, method_name)
        ],
    )


def _is_mapped(dataset: Dataset) -> bool:
    """Tell whether examples are what a function makes of rows, and so may differ in shape."""
    return isinstance(dataset._pipeline, Examples) and bool(dataset._pipeline.reader.fns)


def _parts(dataset: Dataset, method_name: str) -> list[Any]:
    """Return all examples as trees of rows: one tree, or one for each example that is mapped."""
    elements = [*_stream(dataset, method_name)()] if _is_mapped(dataset) else []
    return [_row(element) for element in elements] or [rows_of(dataset, method_name)]


def _row(element: Any) -> Any:
    """Return an example as a tree of arrays of one row."""
    return pytree.map(lambda leaf: np.asarray(leaf)[None], element)


def _joined(kind: type[Dataset], trees: list[Any]) -> Dataset:
    """Return a dataset of the rows of several trees of arrays, one after the other.

    Where their shapes differ, so that they are no array, a function picks each row.
    """
    if not trees:
        raise DataError("a dataset without elements has no rows of which to make another.")
    _of_one_kind(_same_dtype, trees)
    leaves = [pytree.flatten(tree)[0] for tree in trees]
    if all(len({leaf.shape[1:] for leaf in column}) == 1 for column in zip(*leaves, strict=True)):
        return kind(pytree.map(lambda *columns: np.concatenate(columns), *trees))
    ends = np.cumsum([len(columns[0]) for columns in leaves])

    def pick_row(number: Any) -> Any:
        part = int(np.searchsorted(ends, number, side="right"))
        return pytree.map(lambda leaf: leaf[number - ends[part]].copy(), trees[part])

    return Dataset.map(kind(np.arange(ends[-1])), pick_row)


def _of_one_kind(fn: Callable[..., Any], trees: list[Any]) -> Any:
    try:
        return pytree.map(fn, *trees)
    except ValueError as error:
        raise TypeError(
            f"datasets that are joined have elements of one kind, but {error}"
        ) from None


def _same_dtype(*leaves: Any) -> None:
    # Texts are of one kind, however long.
    kinds = {leaf.dtype.kind if leaf.dtype.kind in "SU" else str(leaf.dtype) for leaf in leaves}
    if len(kinds) > 1:
        raise ValueError(f"their dtypes are {' and '.join(sorted(kinds))}")


def _lists(tree: Any) -> bool:
    """Tell whether there is a list in a tree."""
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple) else ()
    return isinstance(tree, list) or any(map(_lists, parts))


def _of(fn: Callable[..., Any], element: Any) -> Any:
    return fn(*element) if type(element) is tuple else fn(element)


def _typed(element: Any, types: Any) -> Any:
    """Return an element with arrays as leaves, of the dtypes of a tree or of a tree of specs."""
    if types is not None and _keys(element) != _keys(types):
        raise TypeError(
            f"Dataset.from_generator: the generator gave {element!r:.80}, which has not the "
            f"structure of {types!r:.80}."
        )
    if isinstance(element, tuple | Mapping):
        parts = {key: _typed(element[key], types and types[key]) for key in _keys(element)}
        return parts if isinstance(element, Mapping) else tuple(parts.values())
    if not isinstance(types, TensorSpec):
        return constant(element, types)
    return shaped("Dataset.from_generator", constant(element, types.dtype), types.shape)


def _keys(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [*range(len(tree))]
    return sorted(tree) if isinstance(tree, Mapping) else []
