"""All-reduces in memory that the ranks of a node share.

Each rank's values stand in a row of a matrix; rank r of a node folds slice r of the columns of all
rows, in rank order, so every element is read once and every result has the same bits on all ranks.
Between nodes the slices go on in lanes (`mpistrat.arena.nodes`, `mpistrat.collectives.lanes`).

Two ways to the matrix: arrays of the arena lie in it, and are folded where they are; others are
packed into scratch memory, and the results copied out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import numpy as np

from mpistrat.arena.arena import Arena, ArenaAddress, Block
from mpistrat.arena.layout import Specs, slice_of
from mpistrat.arena.storage import Storage
from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.lanes import Lane, compile_wire, fold_between, fold_far
from mpistrat.collectives.packs import LIMIT, Pack, fill
from mpistrat.collectives.results import Results
from mpistrat.collectives.spans import Packed, Placed, Range, Scales, spans_of
from mpistrat.comm.base import Comm
from mpistrat.kernels.fold import (
    compile_for,
    compiles,
    fold_pair,
    fold_rows,
    spread_rows,
    sum_between,
)
from mpistrat.kernels.ops import FOLDS, ReduceOp
from mpistrat.kernels.scaling import power_for
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["NodeFolds"]


class _Compiled(set[np.dtype[Any]]):
    """The dtypes whose folds some call of the session has had compiled; equal on all ranks."""


@final
class NodeFolds:
    """The shared-memory path of a reducer.

    Args:
      lockstep: Tells who the ranks are.
      wire: What float32 travels as between nodes; see `CommunicationOptions`.

    Attributes:
      arena: The shared memory.
    """

    def __init__(self, lockstep: Lockstep, wire: str = WIRES[0]):
        """Make nothing yet."""
        self._lockstep, self.wire = lockstep, wire
        self._size = lockstep.comm.size
        # One for all strategies of the session: a call that is equal on all ranks meets in the same
        # memory, even if a program makes it on another strategy on another rank.
        groups, key = lockstep.session.groups, ("arena", lockstep.order)
        if key not in groups:
            groups[key] = Arena(lockstep.comm, lockstep.options.ranks_per_node)
        self.arena: Arena = groups[key]

    @property
    def possible(self) -> bool:
        """Whether memory can be shared, as far as is known; equal on all ranks."""
        return self._size > 1 and not self.arena.refused

    def buffers(self, specs: Specs) -> list[Array] | None:
        """Return zeroed arrays of these ``(dtype, shape)`` in the arena, or None on every rank.

        Collective.
        """
        if not self.possible:
            return None
        with self._lockstep.hooks.shared():
            return self.arena.block(specs)

    def storage(self, call: str, value: Array, shared: bool) -> Storage:
        """Return the storage of a variable, with the contents that the first rank gives.

        Collective.

        Args:
          call: What it is for.
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks.
          shared: It is always the same on all ranks, so those of a node may have it in common.
        """
        copies = self.arena.copies
        refused = copies.refused
        with self._lockstep.hooks.shared():
            storage = copies.make(value, shared)
        if copies.refused and not refused:
            self.warn(call, "each rank has its own copy of variables")
        return storage

    def homes(
        self, what: Folding, values: Sequence[Array], outs: Sequence[Array] | None
    ) -> list[ArenaAddress] | None:
        """Return where all values lie, if every one is to be folded in place."""
        if outs is None or len(set(map(id, outs))) < len(outs):
            return None  # what is given twice must not be folded twice
        found = []
        for value, out in zip(values, outs, strict=True):
            home = self.arena.home(value) if value is out else None
            if home is None:
                return None
            found.append(home)
        # Between nodes what is added in float32 travels in float32.
        return None if what.narrow and self.arena.nodes().nodes > 1 else found

    def prepare(self, what: Folding, values: Sequence[Array]) -> Packed:
        """Fill the first pack if there is room for it already.

        Not collective: it writes to this rank's own row, which nobody reads outside a reduction.
        """
        # A thread or a child that may not call must not write to the row first.
        self._lockstep.session.check()
        filled = direct = False
        if what.most > LIMIT // 2:  # it may be cut into pieces, which are taken from one run
            values = [v if v.flags.c_contiguous else v.copy() for v in values]
        arena = self.arena
        if what.packs:
            direct = len(what.packs) == 1 and what.most <= arena.direct
            filled = direct or arena.has_room(what.most)
        # By the number of the call to come, which is equal on all ranks whatever has failed before.
        side = (self._lockstep.session.calls + 1) & 1
        if filled:
            pack = what.packs[0]
            row = arena.sides(pack.dtype)[side][self.rank] if direct else self._row(pack)
            fill(pack, values, row)
        return Packed(values, filled, side if direct else None)

    def compile(self, what: Folding, inside: bool = False) -> None:
        """Compile the loops that this call needs, before its proof; `inside` for in place."""
        if what.op in (ReduceOp.SUM, ReduceOp.MEAN):
            narrow = what.narrow if inside else ()
            columns = sum(math.prod(shape) for shape in what.shapes) if narrow else 0
            for dtype in narrow:
                compile_for(dtype, columns)
            for pack in what.packs:
                if not narrow or any(form.result == pack.dtype for form in what.forms):
                    compile_for(pack.dtype, pack.columns)
                    if self.wire != WIRES[0]:
                        compile_wire(pack.dtype, pack.columns)

    def ready(self, op: ReduceOp, dtype: np.dtype[Any], columns: int) -> bool:
        """Tell whether the loop is compiled, alike on all ranks: from the calls proved so far.

        What this process has compiled for another group of ranks is not asked: a NaN that comes of
        two has another payload in loops than in NumPy.
        """
        known = self._lockstep.session.kept(_Compiled)
        if compiles(FOLDS[op], dtype, columns):
            known.add(dtype)
        return FOLDS[op] is np.add and dtype in known

    @property
    def rank(self) -> int:
        """The rank in the node."""
        return self.arena.nodes().node.rank

    def _row(self, pack: Pack) -> Array:
        row: Array = self.arena.scratch(pack.dtype)[self.rank]
        return row

    def room(self, what: Folding, packed: Packed) -> bool:
        """Have scratch memory for these packs, or tell that there is none. Collective."""
        with self._lockstep.hooks.shared():
            return packed.filled or not what.packs or self.arena.make_room(what.most)

    def warn(self, name: str, instead: str = "arrays travel by MPI") -> None:
        """Say that memory is not shared, on rank 0; an error of it is one on every rank.

        Collective.
        """
        warn(
            self._lockstep,
            name,
            f"{name}: the ranks of a node cannot share memory (too little of it, or not allowed), "
            f"so {instead}. The results are the same, and take more of the machine.",
            RuntimeWarning,
            stacklevel=3,
        )

    def fold_packed(self, what: Folding, packed: Packed, scales: Scales, results: Results) -> None:
        """Fold all packs, and give the results away.

        Collective; between the proof and its return only MPI and loops.
        """
        with self.moving():
            if packed.side is not None:
                self._fold_direct(what, packed.side, scales, results)
            else:
                self._fold_packs(what, packed, scales, results)

    def _fold_direct(self, what: Folding, side: int, scales: Scales, results: Results) -> None:
        # Every rank folds everything: for so little, cheaper than to wait for who has folded what.
        # A side is written to again in the next call but one, and to come to the proof of the call
        # between, each rank has to be through with this.
        pack = what.packs[0]
        rows = self.arena.sides(pack.dtype)[side]
        total = np.empty((1, pack.columns), pack.dtype)
        # What has no weights may go by a plan on another rank, so by NumPy.
        ready = scales.table is not None and self.ready(what.op, pack.dtype, pack.columns)
        for start, stop, table, divisor in spans_of(pack, scales):
            fold_rows(FOLDS[what.op], rows, total, start, stop, table, divisor, ready=ready)
        results.take(0, total[0])

    def _fold_pairs(self, what: Folding, packed: Packed, scales: Scales, results: Results) -> None:
        # Of two ranks each folds everything, into where it goes: that moves fewer bytes than to
        # fold one half and copy both. Packs take turns in two pairs of rows.
        node, team = self.arena.nodes().node, self._lockstep.session.team
        for number, pack in enumerate(what.packs):
            side = 2 * (number & 1)
            rows = self.arena.scratch(pack.dtype)[side : side + 2]
            if number or not packed.filled:
                fill(pack, packed.values, rows[node.rank])
                node.barrier()
            spans, ready = spans_of(pack, scales), self.ready(what.op, pack.dtype, pack.columns)
            for start, stop, to in results.places(pack):
                for low, high, table, divisor in spans:
                    begin, end = max(start, low), min(stop, high)
                    if begin < end:
                        into = to[begin - start : end - start]
                        how = (table, divisor, pack.columns, team, ready)
                        fold_pair(FOLDS[what.op], rows, begin, end, into, *how)
        node.barrier()

    def _fold_packs(self, what: Folding, packed: Packed, scales: Scales, results: Results) -> None:
        node = self.arena.nodes().node
        if node.size == 2 and self.arena.nodes().nodes == 1 and what.as_it_is:
            self._fold_pairs(what, packed, scales, results)
            return
        for number, pack in enumerate(what.packs):
            # The proof was the barrier after the first pack, if that was filled before it.
            if number or not packed.filled:
                fill(pack, packed.values, self._row(pack))
                node.barrier()
            rows = self.arena.scratch(pack.dtype)
            at = node.size + self.arena.turn()
            result = rows[at : at + 1]
            spans = spans_of(pack, scales)
            self._fold(what.op, rows[: node.size], result, pack.columns, spans)
            node.barrier()
            results.take(number, result[0])

    def fold_placed(self, op: ReduceOp, placed: Placed, scales: Scales) -> None:
        """Fold arrays where they lie. Collective; the proof was the barrier before it."""
        with self.moving():
            for (block, matrix), spans in zip(placed.rows, placed.spans, strict=True):
                rows = cast(Block, block()).matrices[matrix]  # its arrays are in the caller's hands
                ranges = [Range(start, stop, *scales.of(leaf)) for start, stop, leaf in spans]
                self._fold(op, rows, rows, rows.shape[1], ranges)
            self.arena.nodes().node.barrier()

    def fold_inside(
        self, op: ReduceOp, rows: Array, out: Array, columns: int, spans: Sequence[Range]
    ) -> None:
        """Fold this rank's slice of what its node gave into `out`; for several nodes.

        Not collective. Other ranks may read `out` after a barrier of the node.
        """
        node = self.arena.nodes().node
        low, high = slice_of(node.rank, node.size, columns, rows.dtype)
        whole = sum(span.stop - span.start for span in spans)
        ready = self.ready(op, rows.dtype, whole)
        for span in spans:
            here = span._replace(start=max(low, span.start), stop=min(high, span.stop))
            self._fold_here(op, rows, out, here, whole, ready)

    def fold_first(self, op: ReduceOp, placed: Placed, scales: Scales) -> None:
        """Fold arrays into those of the first rank of the node, and leave the others as they are.

        Collective; the proof was the barrier before it. When it returns, all of the node may read
        the first rows.
        """
        with self.moving():
            for (block, matrix), spans in zip(placed.rows, placed.spans, strict=True):
                rows = cast(Block, block()).matrices[matrix]
                ranges = [Range(start, stop, *scales.of(leaf)) for start, stop, leaf in spans]
                self._fold(op, rows, rows[:1], rows.shape[1], ranges)
            self.arena.nodes().node.barrier()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run the body, which moves data in shared memory; the proof was the barrier before it."""
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        with hooks.shared():
            yield

    def _fold(
        self, op: ReduceOp, rows: Array, out: Array, columns: int, spans: Sequence[Range]
    ) -> None:
        nodes = self.arena.nodes()
        rank, size = nodes.node.rank, nodes.node.size
        low, high = slice_of(rank, size, columns, rows.dtype)
        team = self._lockstep.session.team
        if nodes.nodes == 1:
            whole = sum(span.stop - span.start for span in spans)
            ready = self.ready(op, rows.dtype, whole)
            for span in spans:
                start, stop = max(low, span.start), min(high, span.stop)
                how = (span.scales, span.divisor, whole, team, ready)
                fold_rows(FOLDS[op], rows, out, start, stop, *how)
            return
        self.fold_inside(op, rows, out[:1], columns, spans)
        # A rank exchanges and spreads what it has folded itself, and waits for nobody.
        apart = nodes.lanes < nodes.node.size
        if apart:
            nodes.node.barrier()
        if nodes.lane is not None:
            mine = slice_of(nodes.node.rank, nodes.lanes, columns, out.dtype)
            fold_between(self.over(nodes.lane), op, rows, out[0], mine, spans)
        if apart:
            nodes.node.barrier()
        for span in spans:
            start, stop = max(low, span.start), min(high, span.stop)
            spread_rows(out, 0, start, stop, team)

    def _fold_here(
        self, op: ReduceOp, rows: Array, out: Array, span: Range, whole: int, ready: bool
    ) -> None:
        """Fold columns of this node's rows, for a fold of several nodes."""
        team = self._lockstep.session.team
        if op is ReduceOp.MEAN and span.scales is None:
            sum_between(rows, out, span.start, span.stop, power_for(self._size), team)
            return
        table = None if span.scales is None else span.scales[self.arena.nodes().ranks]
        how = (table, 1.0, whole, team, ready)
        fold_rows(FOLDS[op], rows, out, span.start, span.stop, *how)

    def over(self, comm: Comm) -> Lane:
        """Return the lane of these folds over ranks of several nodes."""
        return Lane(comm, power_for(self._size), self.wire)

    @property
    def twins(self) -> bool:
        """Whether each rank has a twin on every other node, which has the same part of a node."""
        nodes = self.arena.nodes()
        return nodes.nodes > 1 and nodes.lanes * nodes.nodes == self._size

    def fold_parts(self, parts: Sequence[Sequence[tuple[Array, Range]]]) -> None:
        """Make means of columns that are this rank's and its twins' alone, in the first rows.

        Collective over the lane, without a barrier: no other rank of the node reads them.

        Args:
          parts: One list of what all twins want to have; or one for each of them, in their order,
            of what it alone wants, and what becomes of the others' columns is undefined. They have
            matrices of one dtype with a row for each rank of the node, and which columns; the same
            on all nodes, all scaled alike, and at most `mpistrat.collectives.lanes.MOST`.
        """
        lane = self.arena.nodes().lane
        assert lane is not None
        op, whole = ReduceOp.MEAN, sum(s.stop - s.start for some in parts for _, s in some)
        with self.moving():
            # How much is this rank's own: it says nothing of what others have compiled.
            dtype = parts[0][0][0].dtype
            ready = compiles(FOLDS[op], dtype, whole) or self.ready(op, dtype, 0)
            for rows, span in itertools.chain.from_iterable(parts):
                if len(rows) > 1 or span.scales is not None:
                    self._fold_here(op, rows, rows[:1], span, whole, ready)
            fold_far(self.over(lane), op, parts)
