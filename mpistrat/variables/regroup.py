"""The values of all replicas as one value, and one replica's part of it.

`select_local` takes a replica's part of a tree. `Regrouper` makes one tree of the trees that the
replicas hold, as far as the strategy's view shows them. A handshake brings what it has to know of
the other replicas: the summaries of `mpistrat.variables.tree_summary`.

A dict has its keys in one order on all ranks; where the order differs, the keys are sorted.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, final

import numpy as np

from mpistrat import pytree
from mpistrat.comm.serialization import decode, encode, pack, unpack
from mpistrat.errors import LockstepError, StrategyError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.context_stack import check_same_strategy
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import LOCAL_VIEW, SINGLE_REPLICA, DistributedVariable, View
from mpistrat.variables.tree_summary import (
    MIRRORED_TAG,
    NONE_TAG,
    PLAIN_TAGS,
    TEXT_TAG,
    UNSENT_TAG,
    UNWRAPPED_TAGS,
    VARIABLE_TAG,
    Entry,
    LeafMessages,
    TreeSummary,
    encode_order,
    find_parts,
    shorten_text,
    summarize_tree,
)
from mpistrat.variables.values import (
    DistributedValues,
    Mirrored,
    OnRank,
    Origin,
    PerReplica,
    describe_provenance,
)

_SLICES_TAG = b"z"
_UNKNOWN_TAGS = frozenset({UNSENT_TAG, VARIABLE_TAG, MIRRORED_TAG, TEXT_TAG})


def select_local(tree: Any) -> Any:
    """Return `tree` with this replica's component in place of every distributed value."""
    tree_class = type(tree)
    if tree_class is PerReplica:
        return tree._local
    if tree_class in pytree.REPLICATED_LEAVES:
        return tree
    if tree_class is list or tuple in tree_class.__mro__:
        if pytree.REPLICATED_LEAVES.issuperset(map(type, tree)):
            return [*tree] if tree_class is list else tree
    elif (
        tree_class is not dict
        and isinstance(tree, Mapping)
        and not isinstance(tree, dict | UserDict)
    ):
        # It comes as it is, with all that it has beside its items, if none is to be replaced.
        leaves = pytree.flatten(tree)[0]
        if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
            return tree
    return pytree.map(_unwrap_leaf, tree)


def _unwrap_leaf(leaf: object) -> Any:
    return leaf.local if isinstance(leaf, DistributedValues) else leaf


@final
class Regrouper:
    """Makes one value of those that the replicas hold, as far as a view shows them."""

    def __init__(self, lockstep: Lockstep, view: View):
        """Create one for the ranks of `lockstep`, as `view` shows them."""
        self.lockstep = lockstep
        self.view = view
        self.origin = Origin.from_lockstep(lockstep)
        self.rank = lockstep.comm.rank
        self._session_rank = self.origin.ranks[self.rank]
        self.size = lockstep.comm.size
        self._always_known = self.size == 1 or not view.should_wrap
        # Most functions of a run return nothing, so the summary of None is made once.
        self._none_summary = summarize_tree(self.origin, None)

    def check(self, name: str, leaves: Iterable[Any]) -> None:
        """Refuse values and variables of other ranks, or of another strategy's.

        Not collective. Values of the same ranks in another order are fine: a rank has one value,
        whichever replica it is.

        Args:
          name: The call whose argument they are.
          leaves: The leaves of the argument.

        Raises:
          StrategyError: One of them is of others.
        """
        session = self.origin.session
        for leaf in leaves:
            if isinstance(leaf, DistributedVariable):
                other_group = leaf.strategy._replicas
                if other_group.view is SINGLE_REPLICA and other_group.lockstep is not self.lockstep:
                    raise StrategyError(
                        f"{name}: variable {leaf.name!r} belongs to {leaf.strategy!r}, so each "
                        "rank has one of its own. Give what this rank has, v.read_value(); or "
                        "create it in the scope of the current strategy."
                    )
                context = check_same_strategy(leaf.strategy, f"variable {leaf.name!r}")
                if context is None and leaf.strategy._replicas.lockstep is not self.lockstep:
                    raise StrategyError(
                        f"{name}: variable {leaf.name!r} belongs to {leaf.strategy!r}, which is "
                        "another strategy. Use the one whose variable it is."
                    )
            elif (
                isinstance(leaf, PerReplica)
                and leaf._origin
                and leaf._origin.session is not session
            ):
                strategy_text = (
                    "the default strategy or OneDeviceStrategy"
                    if self.view is SINGLE_REPLICA
                    else ""
                )
                value_text = describe_provenance(leaf._provenance) if leaf._provenance else "this"
                raise StrategyError(
                    f"{name}: {value_text} is a value of another strategy, of "
                    f"{len(leaf._origin.ranks)} replicas, and not of {strategy_text or 'the one'} "
                    "that rules here. Call it in the scope of the strategy that made the value."
                )

    def regroup_tree(
        self,
        call: str,
        tree: object,
        failure: BaseException | None = None,
        should_unwrap_plain: bool = False,
        has_more: bool = False,
    ) -> Any:
        """Return what cross-replica code sees of the trees that the replicas hold.

        Collective: one handshake; small values are sent with it.

        Args:
          call: The text of the call; the structure of the tree is added to it.
          tree: The tree of this replica.
          failure: The error that it failed with instead.
          should_unwrap_plain: Do not wrap text, bytes and bools that are the same on all replicas.
          has_more: As that of `Lockstep.compare_payloads`.

        Returns:
          In the global view, `tree` with a `PerReplica` for every leaf, except for ``None``,
          variables, values that are mirrored indeed, and with `should_unwrap_plain` equal text,
          bytes and bools; in the others, this replica's `tree`. A dict has its keys in the same
          order on all ranks: that of all replicas, or, if they differ, sorted.

        Raises:
          LockstepError: The structures differ.
        """
        if failure is not None or not self.view.should_wrap:
            order = encode_order(tree)
            messages_or_none = self.lockstep.compare_payloads(
                call, order, failure, needs_followup=has_more
            )
            if messages_or_none is not None:
                leaves, structure = pytree.flatten(tree)
                tree = pytree.unflatten(pytree.with_sorted_keys(structure), leaves)
            return select_local(tree)
        summary = (
            self._none_summary
            if tree is None
            else self._summarize_tree(call, tree, should_unwrap_plain)
        )
        structure, text, leaves, _, message, is_bare = summary
        received = self.lockstep.compare_payloads(
            f"{call} {text}", message, needs_followup=has_more
        )
        if received is None and is_bare:
            return None if tree is None else pytree.unflatten(structure, leaves)
        structure, messages = self._read_messages(received, summary)
        wrapped = []
        for i, leaf in enumerate(leaves):
            tags = messages.find_tags(i)
            # Values that are called mirrored may differ, and are not mirrored then.
            is_same = self._is_same(call, messages, i, tags, should_unwrap_plain)
            local_leaf = leaf if is_same or not isinstance(leaf, Mirrored) else leaf.local
            wrapped.append(
                leaf if is_same else self._wrap(local_leaf, messages, i, tags, structure)
            )
        return pytree.unflatten(structure, wrapped)

    def wrap_inputs(self, call: str, tree: object) -> Any:
        """Return `tree`, made by every replica for itself, with every leaf wrapped as inputs are.

        Collective: one handshake; small values are sent with it. Variables stay as they are.

        Raises:
          LockstepError: The structures differ, or the replicas hold different variables.
        """
        if not self.view.should_wrap:
            self.lockstep.handshake(call)
            return self.wrap_input(tree)
        summary = self._summarize_tree(call, tree)
        leaves = summary.leaves
        received = self.lockstep.compare_payloads(f"{call} {summary.text}", summary.message)
        structure, messages = self._read_messages(received, summary)
        wrapped = []
        for i, leaf in enumerate(leaves):
            tags = messages.find_tags(i)
            is_same = tags == {VARIABLE_TAG} and self._is_same(call, messages, i, tags)
            wrapped.append(leaf if is_same else self._wrap(leaf, messages, i, tags, structure))
        return pytree.unflatten(structure, wrapped)

    def _summarize_tree(
        self, call: str, tree: object, should_unwrap_plain: bool = False
    ) -> TreeSummary:
        """Return the summary of a tree; raise on all ranks if there can be none."""
        try:
            return summarize_tree(self.origin, tree, should_unwrap_plain)
        except Exception as error:
            self.lockstep.fail_collectively(call, error)

    def _read_messages(
        self, received: Sequence[bytes] | None, summary: TreeSummary
    ) -> tuple[pytree.Structure, LeafMessages]:
        """Return the structure that results have, and the summaries of all ranks.

        Args:
          received: The messages of all ranks; None if they are equal.
          summary: The summary of this replica.
        """
        structure, order = summary.structure, summary.order
        messages = [summary.message] if received is None else received
        start = 1 + len(order)
        if order and find_parts(messages, 1, start) != {order}:
            structure = pytree.with_sorted_keys(structure)
        return structure, LeafMessages(messages, start, len(summary.leaves))

    def _is_same(
        self,
        call: str,
        messages: LeafMessages,
        leaf_index: int,
        tags: set[bytes],
        should_unwrap_plain: bool = False,
    ) -> bool:
        """Tell whether a leaf is one thing of all replicas; not the same variable is an error."""
        if should_unwrap_plain and PLAIN_TAGS.issuperset(tags):
            return len({shorten_text(*entry) for entry in messages.find_entries(leaf_index)}) == 1
        if len(tags) > 1 or UNWRAPPED_TAGS.isdisjoint(tags):
            return False
        is_same = tags == {NONE_TAG} or len(messages.find_entries(leaf_index)) <= 1
        if not is_same and tags == {VARIABLE_TAG}:
            self._fail_on_variables(call, messages.list_entries(leaf_index))
        return is_same

    def _fail_on_variables(self, call: str, entries: list[Entry]) -> NoReturn:
        ranks = self.origin.ranks
        numbers = [int.from_bytes(content, "little") for _, content in entries]
        pairs = sorted(zip(ranks, numbers, strict=True))
        numbers_text = ", ".join(f"no. {number} on rank {rank}" for rank, number in pairs)
        self.lockstep.raise_on_all_ranks(
            LockstepError(
                f"{call}: the replicas hold different variables in the same place: {numbers_text} "
                f"({self.lockstep.rank_text})."
            )
        )

    def _wrap(
        self,
        leaf: object,
        messages: LeafMessages,
        leaf_index: int,
        tags: set[bytes],
        structure: pytree.Structure,
    ) -> PerReplica:
        # The messages decide whether all values are known, so the answer is alike on every rank.
        is_known = _UNKNOWN_TAGS.isdisjoint(tags)
        # A copy, not the live array: every rank knows the same value of a replica.
        local_value = leaf.copy() if isinstance(leaf, np.ndarray) and is_known else leaf
        values = functools.partial(self._values_of, messages, leaf_index, local_value)
        provenance = self.lockstep.session.calls, leaf_index, structure
        return PerReplica(leaf, values, is_known, provenance, self.origin)

    def _values_of(
        self, messages: LeafMessages, leaf_index: int, local_value: object
    ) -> tuple[Any, ...]:
        """Return the values of all replicas, with this rank's `local_value` among them."""
        entries = messages.list_entries(leaf_index)
        if len(entries) < self.size:  # all ranks have the same
            entries *= self.size
        values = [
            OnRank(rank) if tag in _UNKNOWN_TAGS else decode(tag, content)
            for rank, (tag, content) in zip(self.origin.ranks, entries, strict=True)
            if rank != self._session_rank
        ]
        values.insert(self.rank, local_value)
        return tuple(values)

    def wrap_input(
        self, tree: object, leaves_and_structure: tuple[list[Any], pytree.Structure] | None = None
    ) -> Any:
        """Return `tree`, this replica's input, with every leaf as `PerReplica` if the view wraps.

        Not collective: nothing is known of the other replicas' leaves.

        Args:
          tree: The input.
          leaves_and_structure: Its leaves and its structure, if they are known.
        """
        if not self.view.should_wrap_inputs:
            return tree
        leaves, structure = leaves_and_structure or pytree.flatten(tree)
        call_number, origin = self.lockstep.session.calls, self.origin
        add_placeholders, is_known = self._add_placeholders, self._always_known
        wrapped: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, DistributedVariable):
                wrapped.append(leaf)
                continue
            provenance = call_number, len(wrapped), structure
            values = functools.partial(add_placeholders, leaf)
            wrapped.append(PerReplica(leaf, values, is_known, provenance, origin))
        return pytree.unflatten(structure, wrapped)

    def _add_placeholders(self, local_value: object) -> tuple[Any, ...]:
        """Return this replica's value with placeholders for the others that the view shows."""
        if self._always_known:
            return (local_value,)
        values: list[Any] = [*map(OnRank, self.origin.ranks)]
        values[self.rank] = local_value
        return tuple(values)

    def list_local_results(self, value: object) -> tuple[Any, ...]:
        """Return every replica's `value` that the view shows; see the method of `Strategy`."""
        if type(value) is PerReplica and value._is_known and value._origin is self.origin:
            return value.values
        with self.lockstep.validating_collectively("experimental_local_results"):
            leaves, structure = pytree.flatten(value)
            self.check("experimental_local_results", leaves)
        is_leaf = len(leaves) == 1 and leaves[0] is value
        if self.view is LOCAL_VIEW:
            # This replica's copy of a variable that each replica owns, not the value of all
            # together.
            value = pytree.map(
                lambda leaf: _copy_array(leaf._component()) if _is_on_read(leaf) else leaf, value
            )
        if not self.view.should_wrap:
            return (select_local(value),)
        if is_leaf and not isinstance(value, DistributedValues | DistributedVariable):
            return (value,)
        unknown_leaves = [leaf for leaf in leaves if _is_on_read(leaf) or self._is_unknown(leaf)]
        fetched_values = self._fetch(unknown_leaves) if unknown_leaves else {}
        columns = [self._list_values(leaf, fetched_values) for leaf in leaves]
        return tuple(
            pytree.unflatten(structure, [column[rank] for column in columns])
            for rank in range(self.size)
        )

    def _is_unknown(self, leaf: object) -> bool:
        # A strategy of the local view shows one value; here, each of the others is another rank's.
        return isinstance(leaf, PerReplica) and (
            not leaf._is_known or len(leaf.values) != self.size
        )

    def _list_values(
        self, leaf: object, fetched_values: dict[int, tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        if id(leaf) in fetched_values:
            return fetched_values[id(leaf)]
        if isinstance(leaf, PerReplica):
            if leaf._origin is None or leaf._origin == self.origin:
                return leaf.values
            values_by_rank = dict(zip(leaf._origin.ranks, leaf.values, strict=True))
            return tuple(values_by_rank[rank] for rank in self.origin.ranks)
        return (leaf.local if isinstance(leaf, Mirrored) else leaf,) * self.size

    def _fetch(self, leaves: list[Any]) -> dict[int, tuple[Any, ...]]:
        with self.lockstep.validating_collectively("experimental_local_results"):
            local_values = [
                leaf._component() if _is_on_read(leaf) else leaf.local for leaf in leaves
            ]
            message = pack([_encode_value(value) for value in local_values])
        names = [
            leaf._spec()
            if _is_on_read(leaf)
            else (describe_provenance(leaf._provenance) if leaf._provenance else "made")
            for leaf in leaves
        ]
        self.lockstep.handshake(f"experimental_local_results of {', '.join(names)}")
        entries_by_rank = [unpack(text) for text in self.lockstep.gather_texts(message)]
        with self.lockstep.validating_collectively("experimental_local_results"):
            columns = [
                tuple(
                    _copy_array(local_values[i]) if r == self.rank else _decode_value(*entries[i])
                    for r, entries in enumerate(entries_by_rank)
                )
                for i in range(len(leaves))
            ]
        if any(tag == b"p" for entries in entries_by_rank for tag, _ in entries):
            # An object may be packed on its rank and fail to be unpacked on another.
            self.lockstep.handshake("experimental_local_results, unpacked")
        for leaf, column in zip(leaves, columns, strict=True):
            if isinstance(leaf, PerReplica):
                leaf._keep_fetched(column, self.origin)
        return {id(leaf): column for leaf, column in zip(leaves, columns, strict=True)}


def _encode_value(value: object) -> tuple[bytes, bytes]:
    if not isinstance(value, IndexedSlices):
        return encode(value, is_unlimited=True)
    shape = None if value.dense_shape is None else np.array(value.dense_shape, np.int64)
    arrays = (value.values, value.indices, shape)
    return _SLICES_TAG, pack([encode(array, is_unlimited=True) for array in arrays])


def _decode_value(tag: bytes, content: bytes) -> Any:
    if tag != _SLICES_TAG:
        return decode(tag, content)
    values, indices, shape = (decode(*entry) for entry in unpack(content))
    return IndexedSlices(values, indices, shape)


def _copy_array(value: object) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_on_read(leaf: object) -> bool:
    return isinstance(leaf, DistributedVariable) and leaf._is_on_read
