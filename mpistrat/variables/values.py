"""Distributed values: one per replica (`PerReplica`), or the same on all (`Mirrored`).

`repr` and properties never communicate. A replica's larger values show as ``<on rank k>`` to the
other ranks until `Strategy.experimental_local_results` has fetched them.

A value per replica knows its `Origin` (the session, and which rank is which replica) and its
`Provenance`: which leaf of which call it is. Other ranks refuse it; another order of the same ranks
sees it in its own. Reductions and gathers in cross-replica code name the provenance in their text,
so a loop over leaves in another order on one rank is an error that names both. A `Mirrored` counts
as checked in the session that checked it.

`ArrayOperators` has the operators, indexing and conversion of everything that is read as one array.
"""

from __future__ import annotations

import abc
import copy
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import label, seal
from mpistrat.errors import StructureError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import CallState


class ArrayOperators(np.lib.mixins.NDArrayOperatorsMixin):
    """The operators of a value that is read as one array: arithmetic, indexing, conversion.

    Operators are those of the array itself, which leaves some to the other operand, such as a
    sparse matrix or an array of JAX. They make new values: ``x += 1`` makes `x` a name of the sum.
    """

    @abc.abstractmethod
    def _read(self) -> Any:
        """Return the value, not to be written to."""

    def _not_in_place(self, other: object) -> Any:
        return NotImplemented  # so Python takes the operator itself

    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = _not_in_place
    __imod__ = __ipow__ = __ilshift__ = __irshift__ = __iand__ = __ixor__ = __ior__ = _not_in_place

    def __getitem__(self, key: object) -> Any:
        """Return a part of the value."""
        return self._read()[key]

    def __contains__(self, element: object) -> bool:
        """Tell whether an element of the value is equal to `element`."""
        return element in self._read()

    def __len__(self) -> int:
        """Return the length of the value's first axis."""
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the value's first axis; reads once."""
        return iter(self._read())

    def __bool__(self) -> bool:
        """Return the truth of the value, as NumPy does."""
        return bool(self._read())

    def __index__(self) -> int:
        """Return the value as an index."""
        return operator.index(self._read())

    def __float__(self) -> float:
        """Return the value as a float."""
        return float(self._read())

    def __int__(self) -> int:
        """Return the value as an int."""
        return int(self._read())

    def __complex__(self) -> complex:
        """Return the value as a complex number."""
        return complex(self._read())

    def __round__(self, digits: int | None = None) -> Any:
        """Return the value, rounded as NumPy does; without `digits` a number becomes an int."""
        value: Any = np.asarray(self._read())[()]
        return np.round(value, digits or 0) if np.ndim(value) else round(value, digits)

    def __format__(self, spec: str) -> str:
        """Return the value as text, in a format; without one, what `repr` says."""
        return format(np.array(self._read())[()], spec) if spec else str(self)


def _define_operators() -> None:
    """Make the operators of `ArrayOperators` those of the array that is read.

    With a tensor of PyTorch, which has ``__array_wrap__`` and no ``__array_ufunc__``, they stay
    NumPy's functions: an array's own operators do not take one on their right side.
    """

    def method(name: str, operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        numpy_operator = getattr(np.lib.mixins.NDArrayOperatorsMixin, name)

        def apply(self: ArrayOperators, other: object) -> Any:
            if hasattr(other, "__array_wrap__") and not hasattr(other, "__array_ufunc__"):
                return numpy_operator(self, other)
            return operation(self._read(), other)

        apply.__name__, apply.__doc__ = name, numpy_operator.__doc__
        return apply

    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(ArrayOperators, f"__{name}__", method(f"__{name}__", getattr(operator, name)))
    words = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
    for name in words.split():
        op = divmod if name == "divmod" else getattr(operator, f"__{name}__")
        setattr(ArrayOperators, f"__{name}__", method(f"__{name}__", op))
        swapped = functools.partial(_apply_swapped, op)
        setattr(ArrayOperators, f"__r{name}__", method(f"__r{name}__", swapped))


def _apply_swapped(operation: Callable[[Any, Any], Any], right: object, left: object) -> Any:
    return operation(left, right)


_define_operators()


_PER_REPLICA_ADVICE = (
    "each replica has a value of its own. Compute in replica code, strategy.run(step, "
    "args=(value,)), or make them one, strategy.reduce(op, value, axis=None), in replica code "
    "ctx.all_reduce(op, value); or look at value.local, which ranks differ in, or at all of them, "
    "strategy.experimental_local_results(value). A constant number, such as a rate, is no argument "
    "of merge_call: merge_fn takes it from its closure."
)


def _make_refusal(text: str) -> Callable[..., Any]:
    def refuse(self: object, *others: object) -> NoReturn:
        raise TypeError(f"a PerReplica {text}: {_PER_REPLICA_ADVICE}")

    return refuse


class RefusedOperations:
    """The operations of a single value; each raises a TypeError that says what to use instead."""

    _no_arithmetic, _no_bits = _make_refusal("has no arithmetic"), _make_refusal("has no bits")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _no_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _no_arithmetic
    __neg__ = __pos__ = __abs__ = _no_arithmetic
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _no_bits
    __and__ = __rand__ = __xor__ = __rxor__ = __or__ = __ror__ = _no_bits
    __lt__ = __le__ = __gt__ = __ge__ = _make_refusal("cannot be compared")
    __int__ = __float__ = __complex__ = __round__ = _make_refusal("is not a number")
    __bool__ = _make_refusal("is neither true nor false")  # ranks would go different ways
    __len__ = _make_refusal("has no length")
    __iter__ = __contains__ = _make_refusal("cannot be iterated over")
    __getitem__ = _make_refusal("has no parts")

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse: those of an array or a number belong to one value.

            Raises:
              AttributeError: Always; says what to use instead.
            """
            raise AttributeError(
                f"a PerReplica has no {name!r}: {_PER_REPLICA_ADVICE}", name=name, obj=self
            )


class Origin(NamedTuple):
    """The ranks that a value belongs to.

    Attributes:
      session: Their session, known by identity.
      ranks: The rank of the first replica, of the second and so on; a range in rank order.
    """

    session: Any
    ranks: Sequence[int]

    @staticmethod
    def from_lockstep(lockstep: Lockstep) -> Origin:
        """Return the ranks of `lockstep`."""
        return Origin(lockstep.session, lockstep.ranks)


# The number of the call that made a value, the number of the leaf, and the structure of the tree.
# Equal on all ranks, so that handshakes can name it.
Provenance: TypeAlias = "tuple[int, int, pytree.Structure]"


def describe_provenance(provenance: Provenance) -> str:
    """Return the text of a provenance, for handshakes and messages."""
    call, leaf_index, structure = provenance
    return f"{label(pytree.path_names(structure)[leaf_index])} of call {call}"


@final
class OnRank:
    """A placeholder for a value that is on another rank and has not been fetched."""

    def __init__(self, rank: int):
        """Create the placeholder for a value of `rank`."""
        self.rank = rank

    def __repr__(self) -> str:
        """Return ``<on rank k>``."""
        return f"<on rank {self.rank}>"


def describe_provenances(leaves: Iterable[Any]) -> str:
    """Return the provenance of each value per replica among `leaves`, for handshakes."""
    texts = [
        describe_provenance(leaf._provenance)
        for leaf in leaves
        if isinstance(leaf, PerReplica) and leaf._provenance
    ]
    return f" of {', '.join(texts)}" if texts else ""


def format_component(value: object) -> str:
    """Return the text of one component: numbers bare, everything else as its repr."""
    return str(value) if isinstance(value, np.generic) else repr(value)


class DistributedValues:
    """A value with one component per replica.

    It is abstract, but no `abc.ABC`, for the reason of `DistributedVariable`.
    """

    @property
    @abc.abstractmethod
    def local(self) -> Any:
        """The component of this replica."""

    @property
    @abc.abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components that this rank has, without communication."""


@final
class PerReplica(DistributedValues, RefusedOperations):
    """One value per replica; each rank holds its own.

    Args:
      local: The value of this replica.
      known_values: The value of every replica, `OnRank` where it is not known; or a function that
        returns them, which is called when they are needed. None for a value that a program has
        made.
      is_known: Whether every rank knows all of them.
      provenance: The call that made it; equal on all ranks. None for a value that a program has
        made.
      origin: The ranks that it belongs to; None for a value that a program has made.

    Example:
      >>> PerReplica(2.5).local
      2.5
      >>> PerReplica(1, (OnRank(0), 1))
      PerReplica:{
        0: <on rank 0>,
        1: 1
      }
    """

    def __init__(
        self,
        local: object,
        known_values: tuple[Any, ...] | Callable[[], tuple[Any, ...]] | None = None,
        is_known: bool = False,
        provenance: Provenance | None = None,
        origin: Origin | None = None,
    ):
        """Create a value of this replica's `local` and the known values of the others."""
        self._local = local
        self._values = known_values
        self._is_known = is_known
        self._provenance = provenance
        self._origin = origin

    @property
    def local(self) -> Any:
        """The value of this replica."""
        return self._local

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all replicas, in replica order.

        Raises:
          StructureError: Some are on other ranks still; properties do not communicate.
        """
        values = self._resolve_values()
        if not self._is_known or values is None:
            raise StructureError(
                "the values of other replicas are on other ranks. Fetch them first: "
                "strategy.experimental_local_results(value), on every rank."
            )
        return values

    def _resolve_values(self) -> tuple[Any, ...] | None:
        if callable(self._values):
            self._values = self._values()
        return self._values

    def __eq__(self, other: object) -> bool:
        """Return True for this very object, and refuse to compare it with anything else.

        Raises:
          TypeError: `other` is another object; says what to compare instead.
        """
        if other is self:
            return True
        raise TypeError(f"a PerReplica cannot be compared: {_PER_REPLICA_ADVICE}")

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        """Return what `repr` says; a format for one number is refused.

        Raises:
          TypeError: `spec` is not empty; says what to format instead.

        Warns:
          RuntimeWarning: It is in a text now, such as a name, with the values of all replicas; once
            in a program, on rank 0.
        """
        if spec:
            raise TypeError(f"a PerReplica cannot be formatted as {spec!r}: {_PER_REPLICA_ADVICE}")
        if self._origin is not None and self._origin.session.comm.rank == 0:
            state = self._origin.session.get_instance(CallState)
            is_new, state.has_warned_formatted = not state.has_warned_formatted, True
            if is_new:
                text = (
                    f"a PerReplica in a text is shown with all replicas, {self!r:.80}: "
                    f"{_PER_REPLICA_ADVICE}"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return str(self)

    # NumPy leaves operators to Python, and so to this class, instead of making an object array.
    __array_ufunc__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse: a value per replica is not an array.

        Raises:
          StructureError: Always.
        """
        raise StructureError(
            f"a PerReplica is not an array; fn of run gets one. Here {_PER_REPLICA_ADVICE}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make it again, if it is of a program's own making.

        Raises:
          TypeError: It is a value of the ranks of a strategy; says what to pickle instead.
        """
        if self._origin is not None:
            raise TypeError(f"a PerReplica of a strategy cannot be pickled: {_PER_REPLICA_ADVICE}")
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> PerReplica:
        """Return another value of the same ranks, of the same objects."""
        duplicate = object.__new__(PerReplica)
        duplicate.__dict__.update(self.__dict__)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> PerReplica:
        """Return another value of the same ranks, of copies of the objects."""
        duplicate = self.__copy__()
        memo[id(self)] = duplicate
        duplicate._local = copy.deepcopy(self._local, memo)
        duplicate._values = copy.deepcopy(self._resolve_values(), memo)
        return duplicate

    def _keep_fetched(self, values: tuple[Any, ...], origin: Origin) -> None:
        """Keep `values` of all replicas of `origin`, once a collective call has brought them."""
        if self._origin is None:
            self._origin = origin
        # Else they are in another order than this value's own, or of a view that shows more.
        known_values = self._resolve_values()
        if self._origin == origin and (known_values is None or len(known_values) == len(values)):
            self._values = values
            self._is_known = True

    def __repr__(self) -> str:
        """Return ``PerReplica:{...}`` with a line per replica. Never communicates."""
        values = self._resolve_values()
        if values is None:
            return f"PerReplica:{{\n  local: {format_component(self._local)}\n}}"
        lines = [f"  {i}: {format_component(value)}" for i, value in enumerate(values)]
        return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


@final
class Mirrored(DistributedValues, ArrayOperators):
    """A value that is the same on every replica, as reductions give it.

    Arithmetic, attributes and NumPy functions are those of the value itself. It never changes:
    ``m *= 2`` makes `m` the name of a plain array, as ``m = m * 2`` does, which is compared before
    it is written to a variable.

    Args:
      value: The value.
      replica_count: The number of replicas.
      handshake_name: The name of the handshake that showed it to be the same on all replicas, as
        results of collectives have; without one it is compared before it is written to a
        variable. A checked array is seen through a read-only view, which nobody can make writable.
      origin: The ranks that have checked it; on others it is compared again.

    Example:
      >>> Mirrored(np.array([1.0, 2.0]), 2) + 1
      array([2., 3.])
    """

    __hash__ = object.__hash__

    def __init__(
        self,
        value: Any,
        replica_count: int = 1,
        handshake_name: str = "",
        origin: Origin | None = None,
    ):
        """Create a value that is `value` on each of `replica_count` replicas."""
        is_sealed = handshake_name and isinstance(value, np.ndarray)
        self._value: Any = seal(value) if is_sealed else value
        self._count = replica_count
        self._handshake_name, self._origin = handshake_name, origin

    def __reduce__(self) -> Any:
        """Return how to make it again; a copy is not checked, so compared before it is written."""
        return Mirrored, (self._value, self._count)

    def _find_handshake(self, session: object) -> str:
        """Return the name of the handshake, if it was one of the ranks of `session`."""
        return (
            self._handshake_name
            if self._origin is not None and self._origin.session is session
            else ""
        )

    @property
    def local(self) -> Any:
        """The value."""
        return self._value

    @property
    def values(self) -> tuple[Any, ...]:
        """The value, once per replica."""
        return (self._value,) * self._count

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the value as an array."""
        return np.asarray(self._value).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value as an array."""
        return np.shape(self._value)

    def numpy(self) -> Any:
        """Return a copy of the value as a NumPy array or scalar."""
        return np.array(self._value)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value as an array: a view, read-only if it is checked or a number."""
        # A view of it may be reshaped in place; what is not an array never changes.
        value = self._value
        view = value.view() if isinstance(value, np.ndarray) else seal(np.asarray(value))
        return np.array(view, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a NumPy function to the value."""
        outputs = inputs[:1] if method == "at" else kwargs.get("out", ())  # it ignores read-only
        if any(isinstance(out, Mirrored) for out in outputs):
            raise TypeError("a Mirrored value cannot be written to; use value.numpy() for a copy.")
        kwargs |= {name: np.asarray(mask) for name, mask in kwargs.items() if name == "where"}
        plain_inputs = [i.local if isinstance(i, Mirrored) else i for i in inputs]
        return getattr(ufunc, method)(*plain_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the value, or else of the value as an array."""
        if name.startswith("_"):
            raise AttributeError(f"'Mirrored' object has no attribute {name!r}")
        try:
            return getattr(self._value, name)
        except AttributeError:
            return getattr(np.asarray(self._value), name)

    def _read(self) -> Any:
        return self._value

    def __repr__(self) -> str:
        """Return ``Mirrored:{...}`` with a line per replica."""
        lines = [f"  {i}: {format_component(value)}" for i, value in enumerate(self.values)]
        return "Mirrored:{\n" + ",\n".join(lines) + "\n}"


pytree.register_leaf_class(PerReplica, is_replicated=False)
pytree.register_leaf_class(Mirrored, is_replicated=False)
