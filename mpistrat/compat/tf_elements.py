"""The methods of ``tf.data`` that make a dataset of the elements of others, or of a generator.

Examples, the elements before ``batch``, are read once, when the method is called, and are arrays
from then on: so later steps may shuffle, divide and resume as with any arrays. Batches are read
again in each epoch. Either way each rank reads all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.compat.tf_tensors import TensorSpec, check_shape, constant
from mpistrat.data.dataset import Dataset
from mpistrat.data.pieces import LazyBatch, Order
from mpistrat.data.pipeline import Examples
from mpistrat.data.steps import ArrangingStep, BatchMaker, EpochPath, Seeds
from mpistrat.errors import DataError, RefusedError

_MAX_GENERATED_NBYTES = 1 << 30  # bytes that are taken from a generator


def zip_datasets(dataset_class: type[Dataset], tree: Any) -> Dataset:
    """Return a dataset of trees of the elements of several; it ends with the shortest."""
    datasets, structure = pytree.flatten(tree)
    if (
        not datasets
        or not all(isinstance(dataset, Dataset) for dataset in datasets)
        or _has_list(tree)
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
        return _zip_batches(dataset_class, datasets, structure)
    ends = [dataset.cardinality() for dataset in datasets]
    count = min((end for end in ends if end != Dataset.INFINITE), default=Dataset.INFINITE)
    limited_datasets = [
        Dataset.take(dataset, count) if count >= 0 else dataset for dataset in datasets
    ]
    if count and any(_is_mapped(dataset) for dataset in limited_datasets):
        elements = zip(
            *(_make_stream(dataset, "zip")() for dataset in limited_datasets), strict=True
        )
        return _join_trees(
            dataset_class,
            [_as_row(pytree.unflatten(structure, [*element])) for element in elements],
        )
    return dataset_class(
        pytree.unflatten(structure, [join_examples(dataset, "zip") for dataset in limited_datasets])
    )


def _zip_batches(
    dataset_class: type[Dataset], datasets: list[Dataset], structure: pytree.Structure
) -> Dataset:
    streams = [_make_stream(dataset, "zip") for dataset in datasets]

    def batches() -> Iterator[Any]:
        for parts in zip(*(stream() for stream in streams), strict=False):
            yield pytree.unflatten(structure, [*parts])

    return dataset_class(batches)


def concatenate_datasets(dataset: Dataset, other: Any) -> Dataset:
    """Return the elements of one dataset, then those of another of the same structure."""
    if not isinstance(other, Dataset) or dataset.batched != other.batched:
        elements_text = "batches" if dataset.batched else "examples, before batch"
        raise TypeError(
            f"Dataset.concatenate wants another dataset of {elements_text}, as this one is; got "
            f"{other!r:.60}."
        )
    if dataset.batched:
        element_specs = [dataset.element_spec, other.element_spec]
        if None not in element_specs:  # None: only reading shows the structure
            _map_alike(_check_dtypes, element_specs)
        return _chain_datasets(type(dataset), (dataset, other), "concatenate")
    return _join_datasets(type(dataset), [dataset, other], "concatenate")


@final
@dataclasses.dataclass(frozen=True)
class Cached(ArrangingStep):
    """The order of the first epoch, in each epoch and repetition."""

    def cardinality(self, source_count: int) -> int:
        """Return the same number."""
        return source_count

    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return the rows of the first epoch."""
        return make_order((0,))

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the batches of the first epoch."""
        return make_batches((0,))


def cache_order(dataset: Dataset) -> Dataset:
    """Return the elements in the order of the first epoch, if shuffles have seeds."""
    return dataset if dataset._seed_count else dataset._add_step(Cached())


def flat_map_dataset(dataset: Dataset, fn: Callable[..., Any]) -> Dataset:
    """Return the elements of all datasets that `fn` makes of the elements of one."""
    mapped_datasets = [
        _call_function(fn, element)
        for element in _make_stream(_check_finite(dataset, "flat_map"), "flat_map")()
    ]
    if not mapped_datasets:
        raise DataError(
            "Dataset.flat_map: the dataset has no elements, so what the function makes of them is "
            "not known."
        )
    if not all(isinstance(mapped_dataset, Dataset) for mapped_dataset in mapped_datasets):
        raise TypeError("Dataset.flat_map wants a function that returns datasets.")
    if mapped_datasets[0].batched:
        return _chain_datasets(type(dataset), mapped_datasets, "flat_map")
    return _join_datasets(type(dataset), mapped_datasets, "flat_map")


def select_elements(dataset: Dataset, predicate: Callable[..., Any], method_name: str) -> Dataset:
    """Return the elements for which `predicate` is true; ``take_while`` ends at another."""
    choose: Any = itertools.takewhile if method_name == "take_while" else filter
    stream = _make_stream(dataset, method_name)

    def fits(element: Any) -> bool:
        truth_value = np.asarray(_call_function(predicate, element))
        if truth_value.dtype != bool or truth_value.ndim:
            raise ValueError(
                f"Dataset.{method_name}: the predicate must return one truth value, such as x > 0 "
                f"of a number or tf.reduce_all(x > 0), got {truth_value!r:.60}."
            )
        return bool(truth_value)

    if dataset.batched:
        return type(dataset)(lambda: choose(fits, stream()))
    elements = [*stream()]
    kept_rows = [_as_row(element) for element in choose(fits, elements)]
    template = _as_row(elements[0]) if elements else join_examples(dataset, method_name)
    return _join_trees(type(dataset), kept_rows or [pytree.map(lambda leaf: leaf[:0], template)])


def unbatch_dataset(dataset: Dataset) -> Dataset:
    """Return the rows of all elements."""
    if dataset.batched:
        return _join_trees(
            type(dataset), [*_make_stream(_check_finite(dataset, "unbatch"), "unbatch")()]
        )
    examples = [*_make_stream(dataset, "unbatch")()] if _is_mapped(dataset) else []
    if examples and all(map(np.ndim, pytree.flatten(examples)[0])):
        return _join_trees(type(dataset), examples)
    rows = join_examples(dataset, "unbatch")
    if any(array.ndim == 1 for array in pytree.flatten(rows)[0]):
        raise ValueError("Dataset.unbatch: elements that are numbers have no rows.")
    return type(dataset)(pytree.map(lambda array: array.reshape(-1, *array.shape[2:]), rows))


def make_specs(types: Any, shapes: Any) -> Any:
    """Return a tree of `TensorSpec` of a tree of dtypes and one of shapes.

    Example:
      >>> make_specs(("int32", "float32"), ([], [None]))[1].shape
      (None,)
    """
    if isinstance(types, tuple | Mapping):
        parts = {key: make_specs(types[key], shapes[key]) for key in _list_keys(types)}
        return parts if isinstance(types, Mapping) else tuple(parts.values())
    return TensorSpec(shapes, types)


def read_generator(dataset_class: type[Dataset], generator: Any, args: Any, types: Any) -> Dataset:
    """Return a dataset of the elements of a generator, which has to end.

    Args:
      dataset_class: The class of the result.
      generator: The function that returns it.
      args: The arguments of the function.
      types: A tree of dtypes or of `TensorSpec`; None for the dtypes of the elements.

    Raises:
      TypeError: `generator` is not a function, or an element has another structure than `types`.
      DataError: It does not end before 1 GiB, its elements differ in structure, or it has no
        elements.
      ValueError: An element does not have the shape of its `TensorSpec`.
    """
    if not callable(generator):
        raise TypeError(
            f"Dataset.from_generator wants a function that returns an iterable, got "
            f"{generator!r:.60}."
        )
    elements: list[Any] = []
    nbytes = 0
    for element in generator(*args):
        elements.append(_convert_element(element, types))
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
            return _join_trees(dataset_class, [_as_row(element) for element in elements])
        return dataset_class(pytree.map(lambda *leaves: np.stack(leaves), *elements))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Dataset.from_generator: the elements do not fit together ({error}). Give each the "
            "same structure and dtypes; say both by output_signature."
        ) from error


def join_examples(dataset: Dataset, method_name: str) -> Any:
    """Return all examples, joined along a new first axis."""
    count = count_elements(dataset, method_name)
    if count:
        (rows,) = Dataset.batch(dataset, count)
        return rows
    spec = dataset.element_spec
    if spec is None:
        raise DataError(
            f"Dataset.{method_name}: a dataset has no elements, so their structure is not known."
        )
    return pytree.map(lambda leaf_spec: np.empty((0, *leaf_spec.shape), leaf_spec.dtype), spec)


def count_elements(dataset: Dataset, method_name: str) -> int:
    """Return the number of elements; 0 if it is not known."""
    return max(_check_finite(dataset, method_name).cardinality(), 0)


def _check_finite(dataset: Dataset, method_name: str) -> Dataset:
    if dataset.cardinality() == Dataset.INFINITE:
        raise DataError(f"Dataset.{method_name} reads all elements, so call repeat() after it.")
    return _check_order(dataset, method_name)


def _check_order(dataset: Dataset, method_name: str) -> Dataset:
    if dataset._seed_count:
        raise RefusedError(
            f"Dataset.{method_name} after shuffle() without a seed is refused, as each rank would "
            "have an order of its own. Shuffle after it, or write shuffle(n, seed=7)."
        )
    return dataset


def _make_stream(dataset: Dataset, method_name: str) -> Callable[[], Iterator[Any]]:
    """Return a function that iterates over the elements, in the order of the first epoch.

    Batches may have no end, since each is read only when it is needed.
    """
    pipeline = (_check_order if dataset.batched else _check_finite)(dataset, method_name)._pipeline
    return lambda: pipeline.iterate_elements((), (0,))


def _chain_datasets(
    dataset_class: type[Dataset], datasets: Iterable[Dataset], method_name: str
) -> Dataset:
    streams = [_make_stream(dataset, method_name) for dataset in datasets]
    return dataset_class(lambda: itertools.chain.from_iterable(stream() for stream in streams))


def _join_datasets(
    dataset_class: type[Dataset], datasets: list[Dataset], method_name: str
) -> Dataset:
    nonempty_datasets = [dataset for dataset in datasets if dataset.cardinality()]
    return _join_trees(
        dataset_class,
        [
            part
            for dataset in nonempty_datasets or datasets[:1]
            for part in _list_trees(dataset, method_name)
        ],
    )


def _is_mapped(dataset: Dataset) -> bool:
    """Return whether a function makes the examples of rows, so that they may differ in shape."""
    return isinstance(dataset._pipeline, Examples) and bool(dataset._pipeline.reader.fns)


def _list_trees(dataset: Dataset, method_name: str) -> list[Any]:
    """Return all examples as trees of rows: one tree, or one for each example that is mapped."""
    elements = [*_make_stream(dataset, method_name)()] if _is_mapped(dataset) else []
    return [_as_row(element) for element in elements] or [join_examples(dataset, method_name)]


def _as_row(element: Any) -> Any:
    """Return an example as a tree of arrays of one row."""
    return pytree.map(lambda leaf: np.asarray(leaf)[None], element)


def _join_trees(dataset_class: type[Dataset], trees: list[Any]) -> Dataset:
    """Return a dataset of the rows of several trees of arrays, one after the other.

    Where their shapes differ, so that no array can hold them, a function picks each row.
    """
    if not trees:
        raise DataError("a dataset without elements has no rows of which to make another.")
    _map_alike(_check_dtypes, trees)
    leaves = [pytree.flatten(tree)[0] for tree in trees]
    if all(len({leaf.shape[1:] for leaf in column}) == 1 for column in zip(*leaves, strict=True)):
        return dataset_class(pytree.map(lambda *columns: np.concatenate(columns), *trees))
    ends = np.cumsum([len(columns[0]) for columns in leaves])

    def pick_row(number: Any) -> Any:
        part = int(np.searchsorted(ends, number, side="right"))
        return pytree.map(lambda leaf: leaf[number - ends[part]].copy(), trees[part])

    return Dataset.map(dataset_class(np.arange(ends[-1])), pick_row)


def _map_alike(fn: Callable[..., Any], trees: list[Any]) -> Any:
    try:
        return pytree.map(fn, *trees)
    except ValueError as error:
        raise TypeError(
            f"datasets that are joined have elements of one kind, but {error}"
        ) from None


def _check_dtypes(*leaves: Any) -> None:
    # Texts of all lengths are of one kind.
    kinds = {leaf.dtype.kind if leaf.dtype.kind in "SU" else str(leaf.dtype) for leaf in leaves}
    if len(kinds) > 1:
        raise ValueError(f"their dtypes are {' and '.join(sorted(kinds))}")


def _has_list(tree: Any) -> bool:
    """Return whether there is a list in a tree."""
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple) else ()
    return isinstance(tree, list) or any(map(_has_list, parts))


def _call_function(fn: Callable[..., Any], element: Any) -> Any:
    return fn(*element) if type(element) is tuple else fn(element)


def _convert_element(element: Any, types: Any) -> Any:
    """Return an element with arrays as leaves, of the dtypes of a tree or of a tree of specs."""
    if types is not None and _list_keys(element) != _list_keys(types):
        raise TypeError(
            f"Dataset.from_generator: the generator gave {element!r:.80}, which has not the "
            f"structure of {types!r:.80}."
        )
    if isinstance(element, tuple | Mapping):
        parts = {
            key: _convert_element(element[key], types and types[key]) for key in _list_keys(element)
        }
        return parts if isinstance(element, Mapping) else tuple(parts.values())
    if not isinstance(types, TensorSpec):
        return constant(element, types)
    return check_shape("Dataset.from_generator", constant(element, types.dtype), types.shape)


def _list_keys(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [*range(len(tree))]
    return sorted(tree) if isinstance(tree, Mapping) else []
