"""``ReplicaContext.all_reduce`` behind its door: what is given made ready, folded, given back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, as_array, dtype_name, finish, kind_of, label, spec_text
from mpistrat.collectives.folding import SMALL, Folding, put
from mpistrat.collectives.forms import form
from mpistrat.collectives.part import Part
from mpistrat.collectives.planned import Plan, SharedPlan
from mpistrat.collectives.plans import InPlace, Request, Sketch, request
from mpistrat.collectives.results import of_one
from mpistrat.collectives.texts import described
from mpistrat.distribute import sparse
from mpistrat.distribute.naming import named
from mpistrat.distribute.parts import Parts
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.sparse import SlicesPart
from mpistrat.distribute.values import DistributedValues
from mpistrat.distribute.views import ALONE
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.sharedmem.pool import Pool

__all__ = [
    "Call",
    "all_reduce",
    "fit",
    "places",
    "prepared",
    "reduce_in_replica",
    "said",
    "takes",
]


class Call(NamedTuple):
    """One all-reduce, found good.

    Attributes:
      op: The fold.
      leaves: The leaves as they were given.
      structure: Of the tree.
      parts: What this rank gives, leaf by leaf.
      weight: How many examples it stands for.
    """

    op: ReduceOp
    leaves: list[Any]
    structure: nest.Structure
    parts: list[Part | SlicesPart]
    weight: float


def prepared(reduce_op: Any, value: Any, weight: Any) -> Call:
    """Return the call, or raise what is wrong with it. Not collective."""
    op = ReduceOp.parse(reduce_op)
    number = _weight(op, weight)
    leaves, structure = nest.flatten(value)
    leaves = [x.local if isinstance(x, DistributedValues) else x for x in leaves]
    paths = named(leaves, structure)
    parts: list[Part | SlicesPart]
    if IndexedSlices in map(type, leaves):
        pairs = zip(leaves, paths, strict=True)
        parts = [sparse.contribution(op, leaf, path, number) for leaf, path in pairs]
        return Call(op, leaves, structure, parts, number)
    arrays = [as_array(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    parts = [
        Part(array, form(op, array.dtype, path), number, path)
        for array, path in zip(arrays, paths, strict=True)
    ]
    return Call(op, leaves, structure, parts, number)


def said(name: str, call: Call, weigh: bool) -> tuple[str, list[Part], Folding]:
    """Return the text of a call without its leaves, those that are arrays, and how they fold."""
    how = " weighted" if weigh else ""
    start = f"{name}({call.op.value}{how}, {nest.describe(call.structure)})"
    dense = [part for part in call.parts if isinstance(part, Part)]
    forms, shapes = [part.form for part in dense], [part.value.shape for part in dense]
    return start, dense, Folding(described(start, dense), call.op, forms, shapes)


def _weight(op: ReduceOp, weight: float | None) -> float:
    if weight is None:
        return 1.0
    if op is not ReduceOp.MEAN:
        raise ValueError(f"weight is for MEAN; {op.value} has none.")
    given = np.asarray(weight)
    number = float(given) if given.ndim == 0 and given.dtype.kind in "iuf" else math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"weight must be a number of examples, 0 or more, not {weight!r}.")
    return number


def places(
    out: Any, structure: nest.Structure, parts: Sequence[Part | SlicesPart]
) -> list[Array] | None:
    """Return the leaves of `out`, or raise what makes them unfit for the results of `parts`."""
    if out is None:
        return None
    outs, given = nest.flatten(out)
    if given != structure:
        raise StructureError(
            f"out must have the structure of value, {nest.describe(structure)}, not "
            f"{nest.describe(given)}."
        )
    found = []
    for i, (place, part) in enumerate(zip(outs, parts, strict=True)):
        if isinstance(part, SlicesPart):
            raise LeafTypeError(f"out: {label(part.path)} is IndexedSlices, which have no out.")
        found.append(fit(place, part.value.shape, part.form.result, structure, i))
    return found


def takes(out: Any, value: Any) -> bool:
    """Tell whether a small sum of `value`, which plans know of, can be put into `out`."""
    if not (type(out) is np.ndarray and type(value) is np.ndarray and value.nbytes <= SMALL):
        return False
    same = out.dtype == value.dtype and out.shape == value.shape
    return same and out.flags.writeable


def fit(
    place: Any, shape: tuple[int, ...], dtype: np.dtype[Any], tree: nest.Structure, leaf: int
) -> Array:
    """Return an array where a result of that shape and dtype can be put: that leaf of `out`.

    Raises:
      LeafTypeError: It is none, or of another shape or dtype.
      ValueError: It is read-only.
    """
    kind = kind_of(place)
    if kind is not None:
        place = kind.as_array(place, nest.path_names(tree)[leaf])
    if isinstance(place, np.ndarray) and place.shape == shape and place.dtype == dtype:
        if place.flags.writeable:
            return place
        path = nest.path_names(tree)[leaf]
        raise ValueError(f"out: {label(path)} is read-only, so the result cannot go there.")
    path = nest.path_names(tree)[leaf]
    wanted = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
    if not isinstance(place, np.ndarray):
        raise LeafTypeError(
            f"out: {label(path)} is {type(place).__name__}; wanted an array to write to, {wanted}."
        )
    raise LeafTypeError(f"out: {label(path)} is {spec_text(place)}; the result is {wanted}.")


def all_reduce(parts: Parts, reduce_op: Any, value: Any, weight: Any, out: Any) -> Any:
    """Fold `value` over the replicas; see `ReplicaContext.all_reduce`. Collective."""
    asked = None
    if weight is None:
        plan = parts.plans.lone(reduce_op, value)
        if plan is not None and (out is None or takes(out, value)):
            return plan.one(value) if out is None else put([plan.one(value)], [out])[0]
    if weight is None and out is None:
        asked = request(reduce_op, value)
        plan = parts.plans.find(asked)
        if plan is not None and asked is not None:
            return asked.tree(plan.all(asked.leaves))
    if parts.view is ALONE:
        return _of_one(parts, reduce_op, value, weight, out)
    return reduce_in_replica(parts, asked, reduce_op, value, weight, out)


def _of_one(parts: Parts, reduce_op: Any, value: Any, weight: Any, out: Any) -> Any:
    call = prepared(reduce_op, value, weight)
    outs = places(out, call.structure, call.parts)
    if outs is None:
        alone = [_alone(call.op, part) for part in call.parts]
        return nest.unflatten(call.structure, list(map(finish, alone, call.leaves)))
    dense = [part for part in call.parts if isinstance(part, Part)]  # all: the rest has no out
    if call.op is ReduceOp.MEAN and call.weight == 0:
        for place in outs:
            place[...] = np.nan
    else:
        dtypes = [part.form.result for part in dense]
        of_one([part.value for part in dense], outs, dtypes, parts.lockstep.session.kept(Pool))
    return out


def _alone(op: ReduceOp, part: Part | sparse.SlicesPart) -> Any:
    if isinstance(part, sparse.SlicesPart):
        return sparse.alone(op, part)
    # One replica by construction: its value, with its dtype, even for a mean of integers.
    if op is ReduceOp.MEAN and part.weight == 0:
        return np.full(part.value.shape, np.nan, part.form.result)
    return np.array(part.value)


def reduce_in_replica(
    parts: Parts, asked: Request | None, reduce_op: Any, value: Any, weight: Any, out: Any
) -> Any:
    """Fold `value` over the replicas; see `ReplicaContext.all_reduce`. Collective."""
    if out is value and _once_more(parts, reduce_op, value, weight):
        return out
    asked, weigh = asked or request(reduce_op, value), weight is not None
    if asked is not None:
        plan = parts.plans.find(asked, weigh)
        if plan is not None:
            outs = None if out is None else _room(parts, asked, plan, value, out)
            if out is None or outs is not None:
                return _planned(parts, asked, plan, weight, outs, out)
        if out is value and _in_place(parts, asked, weight):
            return out
    sketch = parts.plans.sketch(asked, weigh)
    if sketch is not None and asked is not None:
        return _again(parts, asked, sketch, weight, out)
    try:
        call = prepared(reduce_op, value, weight)
        outs = places(out, call.structure, call.parts)
        start, dense, what = said("all_reduce", call, weigh)
        alarm = parts.reducer.alarm(start, dense)
    except Exception as error:
        parts.lockstep.refuse("all_reduce", error)
    if not call.leaves:
        return value
    if len(dense) < len(call.parts):
        totals = sparse.all_reduce(parts.reducer, start, call.op, call.parts, weigh=weigh)
    else:
        values = [part.value for part in dense]
        totals = parts.reducer.fold(what, values, [call.weight], weigh, outs, alarm)
        if asked is not None:
            parts.plans.learn(asked, what, dense, weigh)
    if outs is not None:
        return out
    return nest.unflatten(call.structure, list(map(finish, totals, call.leaves)))


def _room(
    parts: Parts, asked: Request, plan: Plan | SharedPlan, value: Any, out: Any
) -> list[Array] | None:
    """Return the arrays of `out`, if a plan puts totals there."""
    places = asked.leaves if out is value else asked.places(out)
    if places is None or not parts.plans.aside(plan, asked, places):
        return None
    return places if out is not value or asked.can_be_written_to else None


def _planned(
    parts: Parts, asked: Request, plan: Plan | SharedPlan, weight: Any, outs: Any, out: Any
) -> Any:
    """Fold what a plan knows of, into other arrays if they are given. Collective."""
    given: tuple[float, ...] = ()
    if weight is not None:
        try:
            given = (_weight(ReduceOp.MEAN, weight),)
        except Exception as error:
            parts.lockstep.refuse("all_reduce", error)
    if outs is None:
        return asked.tree(plan.all(asked.leaves, *given))
    plan.into(asked.leaves, outs, *given)
    return out


def _once_more(parts: Parts, reduce_op: Any, value: Any, weight: Any) -> bool:
    """Fold arrays of the arena where they lie, if the very same were folded last. Collective."""
    leaves = list(value) if type(value) is list or type(value) is tuple else []
    known = parts.plans.again(reduce_op, weight is not None, value, leaves)
    if known is not None:
        _placed(parts, known, leaves, weight)
    return known is not None


def _in_place(parts: Parts, asked: Request, weight: Any) -> bool:
    """Fold leaves of the arena where they lie, if their like were folded before. Collective."""
    reduce_op, structure = asked.key[:2]
    weigh = weight is not None
    try:
        key = (reduce_op, weigh, structure, *map(id, asked.leaves))
        known = parts.plans.in_place(key)
        if known is None:
            sketch = parts.plans.sketch(asked, weigh)
            if sketch is None or not sketch.what.worth_a_place:
                return False
            parts.plans.learn_in_place(key, sketch.what, asked)
            known = parts.plans.in_place(key)
            if known is None:
                return False
        if not known.has(asked.leaves):
            return False  # the general path says what is wrong, if anything is
    except Exception as error:
        parts.lockstep.refuse("all_reduce", error)
    _placed(parts, known, asked.leaves, weight)
    return True


def _placed(parts: Parts, known: InPlace, leaves: list[Array], weight: Any) -> None:
    try:
        number = _weight(known.what.op, weight)
    except Exception as error:
        parts.lockstep.refuse("all_reduce", error)
    parts.reducer.fold_placed(known.what, known.placed, number, weight is not None, leaves)


def _again(parts: Parts, asked: Request, sketch: Sketch, weight: Any, out: Any) -> Any:
    what, numbers = sketch
    try:
        number = _weight(what.op, weight)
        values = [x if type(x) is np.ndarray else np.asarray(x) for x in asked.leaves]
        outs = None
        if out is not None:
            outs, given = nest.flatten(out)
            if given != asked.structure:
                places(out, asked.structure, [])  # says so
            outs = [
                fit(place, value.shape, what.forms[i].result, asked.structure, i)
                for i, (place, value) in enumerate(zip(outs, values, strict=True))
            ]
    except Exception as error:
        parts.lockstep.refuse("all_reduce", error)
    totals = parts.reducer.fold(what, values, [number], weight is not None, outs)
    parts.plans.learn_again(asked, what, values, weight is not None)
    if outs is not None:
        return out
    if any(numbers):
        totals = [t[()] if is_one else t for t, is_one in zip(totals, numbers, strict=True)]
    return nest.unflatten(asked.structure, totals)
