"""Every replica's part of each global batch; one handshake a step.

A distributed iterator continues until the data of all replicas have ended. A replica whose data end
earlier, or for which a short batch has no rows, gets arrays with no rows and the right dtypes, so
all replicas take the same number of steps.

The handshake of a step also shows that the elements of all ranks have one structure and the same
dtypes, and that a global batch which they divide has one number of rows. At the first step of an
epoch, and every ``MPISTRAT_CHECK_EVERY`` steps after it, it shows that batches which all ranks read
or compute in full have the same contents: those of a generator or of files, a map after `batch`,
padding to the longest. Rows that only one rank reads or maps are not compared. Where each rank
brings a dataset, the first step carries a digest of its first batch, and there is a warning if all
ranks have the same. The text of the call names dataset, iterator, epoch and step.

If an element cannot be read, its ``next()`` raises on all ranks, and the following ``next()``
continues with the following element. If the source itself has failed, or the ranks have made
different calls, every further ``next()`` raises.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.comm.serialization import decode, encode
from mpistrat.data import position
from mpistrat.data.comparison import (
    SIGNATURE_NBYTES,
    ElementSignature,
    compare_rows,
    fail_with_groups,
)
from mpistrat.data.dataset import Dataset
from mpistrat.data.filtered import judge_rows_collectively
from mpistrat.data.iterators import ElementIterator, Optional
from mpistrat.data.position import EpochPosition
from mpistrat.data.sharding import UNSEEN, Parts, Sharding, StepPart
from mpistrat.data.sources import INFINITE, Spec, describe_failure
from mpistrat.errors import DataError, LockstepError
from mpistrat.lockstep.frame import find_distinct_payloads
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep

# The payload of a `_Step`.
_STEP = struct.Struct(f"<B?q{SIGNATURE_NBYTES}s{len(UNSEEN)}s")
_HAS_ELEMENT = 1
_END_MARK = -2  # in place of a number of rows
_ADVICE = (
    "Every rank must hold the same dataset, and make the same of each batch. Give a seed to what "
    "is random in its source, or in a map after batch, so that all ranks draw alike. If a map "
    "treats each row on its own, map(fn, rowwise=True) lets each rank draw for its own rows. Use "
    "distribute_datasets_from_function for a dataset of each rank."
)
_LAST_BITS = (
    "If the results differ in their last bits only, as hosts of other kinds compute them, that too "
    "is over with rowwise=True, or MPISTRAT_CHECK_EVERY=0 in the environment compares no contents."
)
_UNSHARDED = (
    "{what}: each rank has its own dataset, and the first elements of all ranks are the "
    "same. If every rank reads all the data, each example counts once for every rank. In "
    "the function that makes the dataset, call dataset.shard(context.num_input_pipelines, "
    "context.input_pipeline_id) before shuffle and batch; or give one dataset of global "
    "batches to experimental_distribute_dataset."
)


FlatElement: TypeAlias = "tuple[list[Any], pytree.Structure]"


class _Step(NamedTuple):
    """The step of a rank, as it sends it.

    Attributes:
      bits: _HAS_ELEMENT and, above it, the bits of `_get_local_bits`.
      lacks_signature: Whether it has never had an element.
      row_count: The rows of the global batch; _END_MARK at the end.
      signature_digest: The digest of structure and dtypes.
      contents: As those of `StepPart`.
    """

    bits: int
    lacks_signature: bool
    row_count: int
    signature_digest: bytes
    contents: bytes


class _DatasetCounter:
    """The number of datasets that were distributed in a session; equal on all ranks."""

    distributed = 0


@final
@dataclass(frozen=True)
class InputGate:
    """The connection of a distributed dataset to its strategy.

    Attributes:
      lockstep: The ranks, and their handshake.
      wrap_element: Returns the value that cross-replica code sees, given this replica's element,
        and its leaves and structure, or None if these are not known.
      check_context: Raises where the program may not ask for data, as in replica code.
      shows_only_local: Whether cross-replica code sees only this replica's part.
    """

    lockstep: Lockstep
    wrap_element: Callable[[Any, FlatElement | None], Any]
    check_context: Callable[[], None]
    shows_only_local: bool = False


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """The specs of one leaf, on each replica that the strategy shows.

    Attributes:
      specs: One `Spec` for each replica.
    """

    specs: tuple[Spec, ...]

    def __repr__(self) -> str:
        """Return all of them."""
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"


@final
class DistributedDataset:
    """A dataset divided over the replicas of a strategy; iterate over it in cross-replica code.

    Made by ``Strategy.experimental_distribute_dataset``, where every global batch of L rows is cut
    in pieces of ``ceil(L / n)`` unless its options say otherwise, or by
    ``distribute_datasets_from_function``, where every replica brings its own batches. Each
    ``iter()`` is the next epoch, in its own order.

    Collective: making it, ``iter()``, each ``next()``, and `reduce`.
    Cost: one handshake each.
    Like: ``tf.distribute.DistributedDataset``.
    """

    def __init__(
        self,
        sharding: Sharding,
        input_gate: InputGate,
        origin: Dataset | None = None,
        ends_with_first: bool = False,
    ):
        """Distribute the dataset of `sharding`.

        Where all ranks must have the same dataset, the handshake holds its description: source,
        steps, seeds, rows and dtypes; and a digest of rows of arrays in memory, unless ranks may
        hold different ones.

        Args:
          sharding: The way in which it is divided.
          input_gate: The connection to the strategy.
          origin: The dataset as the program knows it, which counts the epochs, so that
            distributing it again in each epoch gives each its own order too.
          ends_with_first: Whether it ends when the first replica's data end, not the last's.
        """
        self._sharding = sharding
        self._origin = sharding.dataset if origin is None else origin
        self._input_gate = input_gate
        self._ends_with_first = ends_with_first
        dataset_counter = input_gate.lockstep.session.get_instance(_DatasetCounter)
        self._name = f"dataset no. {dataset_counter.distributed + 1}"
        with input_gate.lockstep.validating_collectively(f"distribute {self._name}"):
            description, sample = sharding.describe(), sharding.sample_rows()
        call = f"distribute {self._name}, {description}"
        compare_rows(input_gate.lockstep, self._name, call, sample)
        if sharding.is_same_dataset:
            judge_rows_collectively(
                input_gate.lockstep,
                self._name,
                sharding.dataset._pipeline.row_filters,
                sharding.compares_rows,
            )
        dataset_counter.distributed += 1
        self._iterator_count = 0
        describe = Dataset._describe_with_rows if sharding.is_same_dataset else Dataset._describe
        self._description = describe(self._origin)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise: all ranks have made it together, and take its steps together.

        Raises:
          TypeError: Always, when it is copied or pickled; the text names alternatives.
        """
        raise TypeError(
            f"{self._name} cannot be copied or pickled: its steps are calls that all ranks of the "
            "job make. Copy or pickle the dataset that was distributed; distribute it again, on "
            "every rank, for another distributed dataset."
        )

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over the next epoch. Unseeded shuffles take rank 0's seed."""
        self._input_gate.check_context()
        return self._begin_epoch(None)

    def _begin_epoch(self, epoch_position: EpochPosition | None) -> DistributedIterator:
        sharding, lockstep = self._sharding, self._input_gate.lockstep
        needed_seed_count, passed_count, call = (
            sharding.dataset._seed_count,
            0,
            f"iter({self._name})",
        )
        if epoch_position is None:
            local_numbers = [self._origin.epoch, *position.draw_seeds(needed_seed_count)]
        else:
            passed_count, local_numbers = (
                epoch_position.passed_count,
                [epoch_position.epoch, *epoch_position.seeds],
            )
            call += f", of which {passed_count} batches are passed"
        payloads = lockstep.gather_payloads(call, np.array(local_numbers, np.int64).tobytes())
        shared_epoch, *shared_seeds = np.frombuffer(payloads[0], np.int64).tolist()
        epoch, *seeds = (shared_epoch, *shared_seeds) if sharding.is_same_dataset else local_numbers
        self._iterator_count += 1
        with lockstep.validating_collectively(call):
            step_parts = sharding.iterate_epoch(epoch, seeds, passed_count)
        if sharding.make_parts is not None:
            self._origin.begin_after(epoch)
        name = f"iterator {self._iterator_count} of {self._name}, epoch {shared_epoch}"
        iterator = DistributedIterator(
            step_parts, self._input_gate, sharding, name, self._ends_with_first
        )
        iterator._compares_first_elements = (
            sharding.make_parts is None and self._iterator_count == 1 and lockstep.comm.size > 1
        )
        iterator._spec = self.element_spec
        iterator._start_position = EpochPosition(
            epoch, passed_count, tuple(seeds), self._description
        )
        return iterator

    def _resume(self, get_local_bits: Callable[[], int]) -> Iterator[tuple[int, Optional]]:
        """Return an iterator over the remaining elements of the current epoch of the dataset.

        Between two epochs that is the next one. Collective, as iterating is. The position advances
        when the next element is asked for: an element counts when the body of the loop has ended.

        Args:
          get_local_bits: Returns a number of up to 7 bits, which all ranks receive in the handshake
            of the step. Called at each step, and at the end of the epoch.

        Returns:
          An iterator over pairs: the bits of all ranks, by bitwise or, and the element;
          once more without an element, when the epoch is over.

        Raises:
          DataError: The position is not known, as each rank reads data of its own; or the epoch was
            begun with another dataset.
        """
        self._input_gate.check_context()
        with self._input_gate.lockstep.validating_collectively(f"resume {self._name}"):
            epoch_position = position.find_resumable_position(
                self._origin, "" if self._sharding.is_same_dataset else self._sharding.method_text
            )
        iterator = self._begin_epoch(epoch_position)
        iterator._get_local_bits = get_local_bits
        return position.track_elements(
            self._origin, iterator._start_position, iterator, lambda: iterator._all_bits
        )

    @functools.cached_property
    def element_spec(self) -> Any:
        """The tree of `PerReplicaSpec` of a step; None if it is not known before reading.

        A number of rows, the first axis, is None unless it is the same in every step and on every
        replica. Elements that are not batches have no such axis, but where data can end earlier on
        one replica than on others, that one is given empty arrays.
        """
        spec = self._sharding.element_spec
        if spec is None:
            return None
        replica_count = (
            1 if self._input_gate.shows_only_local else self._input_gate.lockstep.comm.size
        )
        has_common_end = self._ends_with_first or self._sharding.dataset.cardinality() == INFINITE
        is_batched = self._sharding.dataset.batched and not self._sharding.is_single_row
        has_rows = is_batched or not has_common_end

        def make_part_spec(leaf_spec: Spec) -> PerReplicaSpec:
            shape = (
                (self._sharding.fixed_row_count, *leaf_spec.shape[1:])
                if leaf_spec.shape and has_rows
                else leaf_spec.shape
            )
            return PerReplicaSpec((Spec(shape, leaf_spec.dtype),) * replica_count)

        return pytree.map(make_part_spec, spec)

    @property
    def cardinality(self) -> int:
        """Return the number of elements of the dataset before it is divided, or -1, or -2.

        As `Dataset.cardinality`: -1 for no end, -2 if it is not known. For a dataset that is not
        batched it is the number of examples; of a dataset of each rank, that of this one.
        """
        return self._origin.cardinality()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the state after all steps of one epoch.

        Collective: all ranks call it. Cost: one handshake a step.

        Args:
          initial_state: The state of the first call.
          reduce_func: ``reduce_func(state, element)`` returns the next state. It is cross-replica
            code: `element` is a value of ``next()``. An exception on one rank is an error on all.
        """
        collective_guard = self._input_gate.lockstep.validating_collectively("reduce_func")
        return functools.reduce(collective_guard(reduce_func), self, initial_state)

    def auto_shard(self, num_shards: int, shard_ix: int) -> DistributedDataset:
        """Return a distributed dataset of every `num_shards`-th batch, from number `shard_ix`.

        Collective: all ranks call it. Cost: one handshake.

        Raises:
          DataError: There is no such shard.
        """
        with self._input_gate.lockstep.validating_collectively("auto_shard"):
            shard = self._sharding.dataset.shard(num_shards, shard_ix)
        description = f"{self._sharding.method_text}, shard {shard_ix} of {num_shards}"
        sharding = self._sharding._replace(dataset=shard, method_text=description)
        return DistributedDataset(sharding, self._input_gate, shard, self._ends_with_first)

    def __repr__(self) -> str:
        """Return what is distributed."""
        return f"DistributedDataset({self._sharding.dataset!r})"


@final
class DistributedIterator(ElementIterator):
    """One epoch of a `DistributedDataset`.

    After the end every ``next()`` raises StopIteration. An error in reading an element is raised on
    every rank in place of that element; the next call continues with the next element if the
    source can still be read. After ranks have made different calls, or hold different data, each
    further ``next()`` is an error.

    Like: ``tf.distribute.DistributedIterator``.
    """

    def __init__(
        self,
        step_parts: Parts,
        input_gate: InputGate,
        sharding: Sharding,
        name: str,
        ends_with_first: bool = False,
    ):
        """Create an iterator over the parts of one epoch; ``iter()`` of the dataset calls it.

        Args:
          step_parts: This replica's parts.
          input_gate: The connection to the strategy.
          sharding: The way in which the dataset is divided.
          name: The iterator's name in handshakes and messages, with dataset and epoch.
          ends_with_first: Whether it ends when the first replica's data end, not the last's.
        """
        self._name = name
        self._elements = step_parts
        self._input_gate = input_gate
        self._sharding = sharding
        self._ends_with_first = ends_with_first
        self._is_exhausted = False
        self._failure = ""
        self._is_uneven = False
        self._signature = ElementSignature()
        self._step_count = 0
        self._spec: Any = None  # for `element_spec`
        # Whether to warn if the first elements of all ranks, which bring their own data, are equal.
        self._compares_first_elements = False
        self._start_position = EpochPosition(0, 0, (), "")
        # Bits that this rank sends at each step, and those of all ranks at the last step.
        self._get_local_bits: Callable[[], int] | None = None
        self._all_bits = 0

    @property
    def element_spec(self) -> Any:
        """The spec of the dataset's elements."""
        return self._spec

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data of every replica have ended.
          ContextError: Called in replica code.
          LockstepError: The ranks read batches of different sizes, structures or dtypes; batches
            that all of them read or map whole differ; or a rank asks another iterator, or for
            another step.
          RemoteError: Reading failed on another rank.
          DataError: The ranks have differed before, or the data have failed: iterate again.
        """
        self._input_gate.check_context()
        if self._failure:
            raise DataError(self._failure)
        if self._is_exhausted:
            raise StopIteration
        try:
            step = self._read_step()
        except BaseException as error:
            # All ranks raise if one rank cannot read an element, so all are at the next step.
            if isinstance(error, LockstepError) or not isinstance(error, Exception):
                self._failure = describe_failure(error)
                self._elements = iter(())  # this ends the thread that reads ahead
            raise
        if step is None:
            self._is_exhausted = True
            raise StopIteration
        element = self._input_gate.wrap_element(*step)
        batch = (element, *pytree.flatten(element)[0]) if self._is_uneven else ()
        self._input_gate.lockstep.state.uneven_batch = batch
        return element

    def _read_step(self) -> tuple[Any, FlatElement | None] | None:
        """Return this replica's next element, and flat if it was flattened; None at the end."""
        failure: Exception | None = None
        step_part: StepPart | None = None
        flat_element: FlatElement | None = None
        lockstep = self._input_gate.lockstep
        size = lockstep.comm.size
        try:
            step_part = next(self._elements, None)
            if step_part is not None and size > 1:
                flat_element = self._signature.update_from(step_part.element)
        except Exception as error:
            failure = error
        self._all_bits = local_bits = self._get_local_bits() if self._get_local_bits else 0
        self._step_count += 1
        if step_part is not None and size == 1:  # there is no other rank to compare with
            lockstep.handshake("next")
            return step_part.element, None
        if step_part is None:
            row_count, contents = _END_MARK, UNSEEN
        else:
            row_count, contents = step_part.row_count, step_part.contents
            if self._compares_first_elements and self._step_count == 1:
                contents = step_part.digest()
        self._is_uneven = self._sharding.is_cut and row_count > 0 and row_count % size > 0
        lacks_signature = step_part is None and not self._signature.has_element
        bits = local_bits << 1 | (step_part is not None)
        payload = _STEP.pack(bits, lacks_signature, row_count, self._signature.digest, contents)
        call = f"next of {self._name}, step {self._step_count - 1}"
        payloads = lockstep.compare_payloads(call, payload, failure)
        if payloads is None and step_part is not None and self._sharding.is_same_dataset:
            return step_part.element, flat_element  # in nearly all steps all ranks are equal
        if not self._compare_steps(call, payloads or [payload], step_part is not None):
            return None
        if step_part is None:
            return self._signature.make_empty_element(), flat_element
        return step_part.element, flat_element

    def _compare_steps(self, call: str, payloads: Sequence[bytes], has_element: bool) -> bool:
        """Return whether the epoch continues, after checking that the ranks agree. Collective.

        Args:
          call: The text of the call.
          payloads: The payload of each rank; one if all are equal.
          has_element: Whether this rank has an element.
        """
        # What is equal on many ranks is looked at once.
        steps = [_Step._make(_STEP.unpack(p)) for p in find_distinct_payloads(payloads)]
        self._all_bits = functools.reduce(operator.or_, [step.bits for step in steps]) >> 1
        element_flags = [step.bits & _HAS_ELEMENT for step in steps]
        if not any(element_flags) or (self._ends_with_first and not all(element_flags)):
            return False
        if self._sharding.is_cut and len({step.row_count for step in steps}) > 1:
            self._fail_on_row_counts(call, payloads)
        if len({step.signature_digest for step in steps if not step.lacks_signature}) > 1:
            self._signature.fail_on_difference(self._input_gate.lockstep, call)
        self._check_contents(call, payloads, {step.contents for step in steps})
        if any(step.lacks_signature for step in steps):
            self._share_signature(has_element)
        return True

    def _fail_on_row_counts(self, call: str, payloads: Sequence[bytes]) -> NoReturn:
        row_counts = [_Step._make(_STEP.unpack(payload)).row_count for payload in payloads]
        fail_with_groups(
            self._input_gate.lockstep,
            f"{call}: the ranks have global batches of different sizes",
            ["the end" if count == _END_MARK else f"{count} rows" for count in row_counts],
            _ADVICE,
        )

    def _check_contents(self, call: str, payloads: Sequence[bytes], contents: set[bytes]) -> None:
        if self._sharding.is_same_dataset and len(contents - {UNSEEN}) > 1:
            contents_of_ranks = [payload[-len(UNSEEN) :] for payload in payloads]
            fail_with_groups(
                self._input_gate.lockstep,
                f"{call}: the contents of a batch that every rank reads or maps whole differ",
                [
                    "" if rank_contents == UNSEEN else f"contents {rank_contents.hex()[:16]}"
                    for rank_contents in contents_of_ranks
                ],
                f"{_ADVICE} {_LAST_BITS}",
            )
        if not self._sharding.is_same_dataset and len(contents) == 1 and UNSEEN not in contents:
            warn(self._input_gate.lockstep, call, _UNSHARDED.format(what=call))

    def _share_signature(self, has_element: bool) -> None:
        # A replica that has never had an element asks for its structure and dtypes; it receives an
        # element without rows.
        lockstep = self._input_gate.lockstep
        call = f"an element of {self._name}"
        with lockstep.validating_collectively(call):
            kind_mark, encoded_element = encode(
                self._signature.make_empty_element() if has_element else None, is_unlimited=True
            )
        texts = lockstep.gather_payloads(call, kind_mark + encoded_element)
        with lockstep.validating_collectively(call):
            if not self._signature.has_element:
                text = next(text for text in texts if text[:1] != b"n")
                self._signature.update_from(decode(text[:1], text[1:]))
        lockstep.handshake(f"{call}, understood")
