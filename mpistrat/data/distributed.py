"""Every replica's part of each global batch; one handshake a step.

A distributed iterator continues until the data of all replicas have ended. A replica whose data end
earlier, or for which a short batch has no rows, gets arrays with no rows, so all replicas take the
same number of steps.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.comm.serialization import decode, encode
from mpistrat.data import position
from mpistrat.data.comparison import LOOK, ElementSignature, compare_rows, refuse
from mpistrat.data.dataset import Dataset
from mpistrat.data.filtered import judge_together
from mpistrat.data.iterators import ElementIterator, Optional
from mpistrat.data.position import EpochPlace
from mpistrat.data.sharding import UNSEEN, Parts, Sharding, StepPart
from mpistrat.data.sources import INFINITE, Spec, failed
from mpistrat.errors import DataError, LockstepError
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep

# The first byte holds _HAS_ELEMENT and, above it, the bits of `asks`.
_STEP = struct.Struct(f"<B?q{LOOK}s{len(UNSEEN)}s")
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


Flat: TypeAlias = "tuple[list[Any], pytree.Structure]"


class _Datasets:
    """How many datasets have been distributed in a session; equal on all ranks."""

    distributed = 0


@final
@dataclass(frozen=True)
class InputGate:
    """How a strategy lets data in.

    Attributes:
      lockstep: Proves each step.
      wrap: Makes what cross-replica code sees of this replica's element, given its leaves and its
        structure too, or None where these are not known.
      check: Raises where no data may be asked for, as in replica code.
      alone: Only this replica's part is shown to cross-replica code.
    """

    lockstep: Lockstep
    wrap: Callable[[Any, Flat | None], Any]
    check: Callable[[], None]
    alone: bool = False


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """What the parts of one leaf look like, on each replica that the strategy shows.

    Attributes:
      specs: One `Spec` for each.
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
        gate: InputGate,
        origin: Dataset | None = None,
        together: bool = False,
    ):
        """Distribute the dataset of `sharding`.

        The handshake of it holds a description of the dataset where all ranks must have the same:
        source, steps, seeds, rows and dtypes; and a digest of rows of arrays in memory, unless
        ranks may hold different ones.

        Args:
          sharding: How it is divided.
          gate: How the strategy lets data in.
          origin: The dataset as the program knows it, which counts the epochs, so that
            distributing it again in each epoch gives each its own order too.
          together: End when the first replica's data end, not the last's.
        """
        self._sharding = sharding
        self._origin = sharding.dataset if origin is None else origin
        self._gate = gate
        self._together = together
        dataset_counter = gate.lockstep.session.kept(_Datasets)
        self._name = f"dataset no. {dataset_counter.distributed + 1}"
        with gate.lockstep.preparing(f"distribute {self._name}"):
            description, sample = sharding.describe(), sharding.sample()
        call = f"distribute {self._name}, {description}"
        compare_rows(gate.lockstep, self._name, call, sample)
        if sharding.same:
            filters = sharding.dataset._level.filters
            judge_together(gate.lockstep, self._name, filters, sharding.compared)
        dataset_counter.distributed += 1
        self._iterators = 0
        identify = Dataset.identity if sharding.same else Dataset.describe
        self._described = identify(self._origin)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: all ranks have made it together, and take its steps together.

        Raises:
          TypeError: Always, when it is copied as when it is pickled; says what to do instead.
        """
        raise TypeError(
            f"{self._name} cannot be copied or pickled: its steps are calls that all ranks of the "
            "job make. Copy or pickle the dataset that was distributed; distribute it again, on "
            "every rank, for another distributed dataset."
        )

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over the next epoch. Unseeded shuffles take rank 0's seed."""
        self._gate.check()
        return self._begin(None)

    def _begin(self, place: EpochPlace | None) -> DistributedIterator:
        sharding, lockstep = self._sharding, self._gate.lockstep
        needed, passed_count, call = sharding.dataset.seeds_needed, 0, f"iter({self._name})"
        if place is None:
            local_numbers = [self._origin.epoch, *position.drawn(needed)]
        else:
            passed_count, local_numbers = place.passed, [place.epoch, *place.seeds]
            call += f", of which {passed_count} batches are passed"
        payloads = lockstep.gather_payloads(call, np.array(local_numbers, np.int64).tobytes())
        first, *shared = np.frombuffer(payloads[0], np.int64).tolist()
        epoch, *seeds = (first, *shared) if sharding.same else local_numbers
        self._iterators += 1
        with lockstep.preparing(call):
            parts = sharding.epoch(epoch, seeds, passed_count)
        if sharding.parts is not None:
            self._origin.begin_after(epoch)
        name = f"iterator {self._iterators} of {self._name}, epoch {first}"
        iterator = DistributedIterator(parts, self._gate, sharding, name, self._together)
        iterator.watched = (
            sharding.parts is None and self._iterators == 1 and lockstep.comm.size > 1
        )
        iterator.spec = self.element_spec
        iterator.place = EpochPlace(epoch, passed_count, tuple(seeds), self._described)
        return iterator

    @property
    def origin(self) -> Dataset:
        """The dataset as the program knows it, which counts the epochs."""
        return self._origin

    def resumed(self, get_local_bits: Callable[[], int]) -> Iterator[tuple[int, Optional]]:
        """Return an iterator over what is left of the epoch in which the dataset stands.

        Between two epochs that is the next one. Collective, as iterating is. The place moves on
        when the next element is asked for: one counts when the body of the loop has ended.

        Args:
          get_local_bits: Returns a number of up to 7 bits, which all ranks receive in the handshake
            of the step. Called at each step, and at the end of the epoch.

        Returns:
          An iterator over pairs: the bits of all ranks, by bitwise or, and the element;
          once more without an element, when the epoch is over.

        Raises:
          DataError: The place cannot be known, as each rank reads data of its own; or it is
            another dataset than that of which the epoch was begun.
        """
        self._gate.check()
        with self._gate.lockstep.preparing(f"resume {self._name}"):
            place = position.checked(
                self._origin, "" if self._sharding.same else self._sharding.how
            )
        iterator = self._begin(place)
        iterator.asks = get_local_bits
        return position.passing(self._origin, iterator.place, iterator, lambda: iterator.told)

    @functools.cached_property
    def element_spec(self) -> Any:
        """The tree of `PerReplicaSpec` of a step; None if only reading could tell.

        A number of rows, the first axis, is None unless it is the same in every step and on every
        replica. Elements that are not batches have no such axis, but where data can end earlier on
        one replica than on others, that one is given empty arrays.
        """
        spec = self._sharding.element_spec
        if spec is None:
            return None
        replica_count = 1 if self._gate.alone else self._gate.lockstep.comm.size
        ends_together = self._together or self._sharding.dataset.cardinality() == INFINITE
        batched = self._sharding.dataset.batched and not self._sharding.single
        cut = batched or not ends_together

        def part(leaf: Spec) -> PerReplicaSpec:
            shape = (self._sharding.rows, *leaf.shape[1:]) if leaf.shape and cut else leaf.shape
            return PerReplicaSpec((Spec(shape, leaf.dtype),) * replica_count)

        return pytree.map(part, spec)

    @property
    def cardinality(self) -> int:
        """Return the number of elements of the dataset before it is divided, or -1, or -2.

        As `Dataset.cardinality`: -1 for no end, -2 if it is not known. For a dataset that is not
        batched it is the number of examples; of a dataset of each rank, that of this one.
        """
        return self._origin.cardinality()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return what is left of `initial_state` after all steps of one epoch.

        Collective: all ranks call it. Cost: one handshake a step.

        Args:
          initial_state: What the first call gets.
          reduce_func: ``reduce_func(state, element)`` returns the next state. It is cross-replica
            code: `element` is what ``next()`` gives. What it raises on one rank is an error on all.
        """
        collective_guard = self._gate.lockstep.preparing("reduce_func")
        return functools.reduce(collective_guard(reduce_func), self, initial_state)

    def auto_shard(self, num_shards: int, shard_ix: int) -> DistributedDataset:
        """Return a distributed dataset of every `num_shards`-th batch, from number `shard_ix`.

        Collective: all ranks call it. Cost: one handshake.

        Raises:
          DataError: There is no such shard.
        """
        with self._gate.lockstep.preparing("auto_shard"):
            shard = self._sharding.dataset.shard(num_shards, shard_ix)
        description = f"{self._sharding.how}, shard {shard_ix} of {num_shards}"
        sharding = self._sharding._replace(dataset=shard, how=description)
        return DistributedDataset(sharding, self._gate, shard, self._together)

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

    Attributes:
      spec: What `element_spec` returns.
      watched: Warn if the first elements of all ranks, which bring data of their own, are the same.
      place: Where it has begun.
      asks: What this rank tells the others at each step, or None.
      told: What all ranks have told at the last step.

    Like: ``tf.distribute.DistributedIterator``.
    """

    def __init__(
        self, parts: Parts, gate: InputGate, sharding: Sharding, name: str, together: bool = False
    ):
        """Give out the parts of one epoch; ``iter()`` of the dataset makes it.

        Args:
          parts: This replica's parts.
          gate: How the strategy lets data in.
          sharding: How the dataset is divided.
          name: What handshakes and messages call the iterator: which one it is, of what, which
            epoch.
          together: End when the first replica's data end, not the last's.
        """
        self._name = name
        self._elements = parts
        self._gate = gate
        self._sharding = sharding
        self._together = together
        self._ended = False
        self._failed = ""
        self._uneven = False
        self._looks = ElementSignature()
        self._steps = 0
        self.spec: Any = None
        self.watched = False
        self.place = EpochPlace(0, 0, (), "")
        self.asks: Callable[[], int] | None = None
        self.told = 0

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self.spec

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data of every replica have ended.
          ContextError: Called in replica code.
          LockstepError: The ranks read batches of different sizes, structures or dtypes; what they
            all read or map whole differs; or a rank asks another iterator, or for another step.
          RemoteError: Reading failed on another rank.
          DataError: The ranks have differed before, or the data have failed: iterate again.
        """
        self._gate.check()
        if self._failed:
            raise DataError(self._failed)
        if self._ended:
            raise StopIteration
        try:
            step = self._step()
        except BaseException as error:
            # Of what one rank cannot read all ranks are told, and all are at the next step.
            if isinstance(error, LockstepError) or not isinstance(error, Exception):
                self._failed = failed(error)
                self._elements = iter(())  # what reads ahead ends with it
            raise
        if step is None:
            self._ended = True
            raise StopIteration
        element = self._gate.wrap(*step)
        batch = (element, *pytree.flatten(element)[0]) if self._uneven else ()
        self._gate.lockstep.state.uneven = batch
        return element

    def _step(self) -> tuple[Any, Flat | None] | None:
        """Return this replica's next element, flat too if somebody has looked; None at the end."""
        failure: Exception | None = None
        item: StepPart | None = None
        flat: Flat | None = None
        lockstep = self._gate.lockstep
        try:
            item = next(self._elements, None)
            if item is not None and lockstep.comm.size > 1:
                flat = self._looks.see(item.element)
        except Exception as error:
            failure = error
        self.told = local_bits = self.asks() if self.asks is not None else 0
        self._steps += 1
        if item is not None and lockstep.comm.size == 1:  # nobody has to hear what it looks like
            lockstep.handshake("next")
            return item.element, None
        rows, contents = (_END_MARK, UNSEEN) if item is None else (item.rows, item.contents)
        self._uneven = self._sharding.cut and rows > 0 and rows % lockstep.comm.size > 0
        if item is not None and self.watched and self._steps == 1:
            contents = item.digest()
        lacks_signature = item is None and not self._looks.seen
        bits = local_bits << 1 | (item is not None)
        small = _STEP.pack(bits, lacks_signature, rows, self._looks.digest, contents)
        call = f"next of {self._name}, step {self._steps - 1}"
        smalls = lockstep.compare_payloads(call, small, failure)
        if smalls is None and item is not None and self._sharding.same:
            return item.element, flat  # nearly always, and then there is nothing to look at
        rank_steps = [_STEP.unpack(payload) for payload in smalls or [small] * lockstep.comm.size]
        self.told = functools.reduce(operator.or_, (bits >> 1 for bits, *_ in rank_steps))
        having = [bits & _HAS_ELEMENT for bits, *_ in rank_steps]
        if not any(having) or (self._together and not all(having)):
            return None
        if self._sharding.cut:
            self._check_rows(call, [rows for _, _, rows, *_ in rank_steps])
        if len({look for _, lacks_signature, _, look, _ in rank_steps if not lacks_signature}) > 1:
            self._looks.refuse(lockstep, call)
        self._check_contents(call, [rank_contents for *_, rank_contents in rank_steps])
        if any(lacks_signature for _, lacks_signature, *_ in rank_steps):
            self._learn(item is not None)
        return (self._looks.empty() if item is None else item.element), flat

    def _check_rows(self, call: str, rows: list[int]) -> None:
        if len(set(rows)) > 1:
            refuse(
                self._gate.lockstep,
                f"{call}: the ranks have global batches of different sizes",
                ["the end" if count == _END_MARK else f"{count} rows" for count in rows],
                _ADVICE,
            )

    def _check_contents(self, call: str, contents: list[bytes]) -> None:
        if self._sharding.same and len({*contents} - {UNSEEN}) > 1:
            refuse(
                self._gate.lockstep,
                f"{call}: the contents of a batch that every rank reads or maps whole differ",
                [
                    "" if rank_contents == UNSEEN else f"contents {rank_contents.hex()[:16]}"
                    for rank_contents in contents
                ],
                f"{_ADVICE} {_LAST_BITS}",
            )
        if not self._sharding.same and UNSEEN not in contents and len(set(contents)) == 1:
            warn(self._gate.lockstep, call, _UNSHARDED.format(what=call), stacklevel=5)

    def _learn(self, has_element: bool) -> None:
        # Only a replica that has never had an element has to ask what one looks like; it is given
        # one without rows.
        lockstep = self._gate.lockstep
        call = f"an element of {self._name}"
        with lockstep.preparing(call):
            kind, data = encode(self._looks.empty() if has_element else None, whole=True)
        texts = lockstep.gather_payloads(call, kind + data)
        with lockstep.preparing(call):
            if not self._looks.seen:
                text = next(text for text in texts if text[:1] != b"n")
                self._looks.see(decode(text[:1], text[1:]))
        lockstep.handshake(f"{call}, understood")
