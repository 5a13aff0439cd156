"""The parameters of a model that have gradients, the memory of these, and whether it has others."""

from __future__ import annotations

import itertools
import operator
import os
import weakref
from typing import Any, final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from xxhash import xxh3_128_digest

from mpistrat.arrays import Array, label
from mpistrat.errors import ContextError, LeafTypeError, LockstepError
from mpistrat.kernels.elementwise import MIN_UNCACHED_NBYTES, copy_to
from mpistrat.torch.tensors import as_array, in_storage_order, tensor_of
from mpistrat.torch.views import bytes_of, is_plain

__all__ = ["GradientRoom", "refuse_modules", "refuse_orders"]

_address, _kind = torch.Tensor.data_ptr, operator.attrgetter("requires_grad", "dtype")
_joined, _values_of = itertools.chain.from_iterable, operator.methodcaller("values")

# Elements of a gradient that are looked at: each may be a cache miss.
_SAMPLES = 32

_rooms: weakref.WeakSet[GradientRoom] = weakref.WeakSet()


def _forked() -> None:
    for room in list(_rooms):
        room.lose()


os.register_at_fork(after_in_child=_forked)


@final
class GradientRoom:
    """What of a model requires grad when this is made.

    Args:
      model: The model.

    Attributes:
      names: The names of the parameters.
      params: The parameters.
      arrays: The buffers of their gradients, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
    """

    def __init__(self, model: Any):
        """Take no memory yet."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self._model, self._dtypes = model, {p: p.dtype for p in self.params}
        self._is_lost = False
        self._look()

    def take_room(self, strategy: Any, c_order: bool) -> list[Any]:
        """Take memory that the ranks of a node share, and a number for each parameter. Collective.

        Args:
          strategy: The strategy.
          c_order: Whether the memory has C order, whatever the order of the parameters.

        Returns:
          Tensors of `Strategy.gradient_buffers`; the last is of the numbers.
        """
        tensors = [p.detach().contiguous() if c_order else p.detach() for p in self.params]
        laid = list(map(in_storage_order, tensors))
        self._backs = [permutation for _, permutation in laid]
        rooms = strategy.gradient_buffers([*[tensor for tensor, _ in laid], torch.empty(len(laid))])
        self.arrays = list(map(as_array, rooms[:-1]))
        self.views = [
            b.permute(permutation) for b, permutation in zip(rooms, self._backs, strict=False)
        ]
        self._places = [view.data_ptr() for view in self.views]
        self._samples = [_sample_of(array) for array in self.arrays]
        # Of a model that no cache holds, what is copied is not read before it has left the caches.
        large = sum(array.nbytes for array in self.arrays) >= MIN_UNCACHED_NBYTES
        self._stream_flags = [large and is_plain(view) for view in self.views]
        self._check = strategy.replicas.lockstep.check
        _rooms.add(self)
        return list(rooms)

    def read_samples(self) -> bytes:
        """Return some elements of each buffer, by which most writes to it show."""
        if not self._samples:
            return b""
        return np.concatenate(self._samples, dtype=np.float64).tobytes()

    def changed_name(self, earlier_samples: bytes) -> str | None:
        """Return whose buffer has other samples than before; None if all have the same."""
        current_samples = self.read_samples()
        if current_samples == earlier_samples:
            return None
        pairs = zip(
            np.frombuffer(current_samples, np.int64),
            np.frombuffer(earlier_samples, np.int64),
            strict=True,
        )
        first = next(i for i, (x, y) in enumerate(pairs) if x != y)
        ends = np.cumsum([sample.size for sample in self._samples])
        name: str = self.names[int(np.searchsorted(ends, first, side="right"))]
        return name

    def lose(self) -> None:
        """Drop the gradient memory, which does not exist in a forked process."""
        self._is_lost = True
        for p, view in zip(self.params, self.views, strict=True):
            p.grad = None if p.grad is view else p.grad

    def accept(self, i: int, gradient: Any) -> None:
        """Raise if a gradient cannot be made one with those of other ranks.

        Raises:
          StrategyError: This process was forked.
          LeafTypeError: It is sparse.
          ContextError: It was made with ``create_graph=True``.
        """
        if self._is_lost:
            self._check()
        if gradient.layout is not torch.strided:
            raise LeafTypeError(
                f"the gradient of {self.names[i]!r} is sparse; of replicated models gradients are "
                "dense. Make the embedding with sparse=False."
            )
        if gradient.requires_grad:
            raise ContextError(
                f"the gradient of {self.names[i]!r} was made with create_graph=True, and no "
                "gradient passes the ranks' mean. Use torch.autograd.grad for higher gradients."
            )

    def keep(self, i: int, gradient: Any) -> None:
        """Copy a gradient to where the ranks reduce it."""
        view = self.views[i]
        if self._stream_flags[i] and is_plain(gradient) and gradient.dtype is view.dtype:
            copy_to(bytes_of(view), bytes_of(gradient))
        else:
            view.copy_(gradient)

    def put_back(self) -> None:
        """Make the views again that a module has given other memory: ``model.share_memory()``."""
        if [*map(_address, self.views)] == self._places:
            return
        for i, place in enumerate(self._places):
            if self.views[i].data_ptr() != place:
                self.views[i] = tensor_of(self.arrays[i]).permute(self._backs[i])

    def check_no_shared_memory(self, call_name: str) -> None:
        """Raise LeafTypeError if one of the parameters has memory of another one, or of a buffer.

        Args:
          call_name: The call that moves the parameters, each to memory of its own.
        """
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        named = sorted((x for x in named if x[1].numel()), key=lambda x: x[1].data_ptr())
        laid = [(as_array(tensor.detach()), name, tensor in self._dtypes) for name, tensor in named]
        for i, (array, name, moves) in enumerate(laid):
            for other_array, other, moves_too in laid[i + 1 :]:
                if not np.may_share_memory(array, other_array):  # nor with any that begins later
                    break
                if (moves or moves_too) and np.shares_memory(array, other_array):
                    raise LeafTypeError(
                        f"{call_name}: {name!r} and {other!r} are views of the same memory, and "
                        "each would be moved to memory of its own. To tie weights, make them one "
                        "torch.nn.Parameter under two names, or use an optimizer of torch.optim."
                    )

    def _look(self) -> None:
        """Record the modules and parameters of the model; each call of the model compares them."""
        modules = self._model.named_modules()
        named_mappings = [(name, d) for name, m in modules for d in (m._parameters, m._modules)]
        self._mappings = [d for _, d in named_mappings]
        self._parts = [
            (d, key, f"{name}.{key}".lstrip("."), part)
            for name, d in named_mappings
            for key, part in d.items()
        ]
        self._keys, self._values = [key for _, key, *_ in self._parts], [x for *_, x in self._parts]
        self._tensors = [part for part in self._values if isinstance(part, torch.Tensor)]
        self._kinds = [*map(_kind, self._tensors)]

    def _find_change(self) -> tuple[str, Any]:
        """Return the name of a part that has changed since `_look`, and its value; "" if none."""
        # Each call of the model asks, so this goes over all parts in built-in functions.
        values = [*_joined(map(_values_of, self._mappings))]
        same = [*_joined(self._mappings)] == self._keys and all(
            map(operator.is_, values, self._values)
        )
        if same and [*map(_kind, self._tensors)] == self._kinds:
            return "", None
        kinds = dict(zip(self._tensors, self._kinds, strict=True))
        for mapping, key, name, part in self._parts:
            current_part = mapping.get(key)
            if current_part is not part or (part in kinds and _kind(part) != kinds[part]):
                return name, current_part
        known_keys = {(id(mapping), key) for mapping, key, *_ in self._parts}
        added = (
            key
            for mapping in self._mappings
            for key in mapping
            if (id(mapping), key) not in known_keys
        )
        return next(added, ""), None

    def differs(self) -> str:
        """Return what of the model has other parameters by now; "" if nothing has."""
        name, _ = self._find_change()
        if name and self._dtypes == {
            p: p.dtype for p in self._model.parameters() if p.requires_grad
        }:
            self._look()
            return ""
        return name

    def checked(self) -> bool:
        """Return False where rows do not show: in transforms of torch.func, and in torch.export.

        Raises:
          ContextError: The model has other parameters by now.
        """
        name, current_part = self._find_change()
        if (
            isinstance(current_part, FakeTensor)
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return False
        if not name or type(current_part) is torch.Tensor:  # in torch.func.functional_call
            return True
        changed_name = self.differs()
        if changed_name:
            raise ContextError(
                f"{changed_name!r} was replaced (setattr, load_state_dict(assign=True)), added, "
                "removed, cast, frozen or unfrozen after replicate, so gradients would stay on "
                "this rank. Call mpistrat.torch.replicate(model) again, on all ranks."
            )
        return True


def _sample_of(array: Array) -> Array:
    """Return a view of some elements of an array: of a small one all."""
    step = array.size // _SAMPLES
    return array.reshape(-1)[:: step | 1] if step > 1 else array.reshape(-1)


def refuse_modules(model: Any, ranks: int) -> None:
    """Raise LeafTypeError if a model has a module whose weights cannot be kept alike.

    Args:
      model: The model.
      ranks: How many ranks there are.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise LeafTypeError(
                f"{label(name)} has no shape yet (it is of a lazy module); call the model once, "
                "on all ranks, before replicate."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise LeafTypeError(
                f"{name or 'the model'!r} is of torch.jit, which shows neither its calls nor its "
                "parameters to Python. Leave it as it was before torch.jit.script or trace; "
                "torch.compile makes it quicker, before or after replicate."
            )
        embeds = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if ranks > 1 and embeds and module.max_norm is not None and module.weight.requires_grad:
            raise LeafTypeError(
                f"{f'{name}.weight'.lstrip('.')!r} is of an embedding with max_norm="
                f"{module.max_norm:g}: each call of it rewrites the rows that are looked up, on "
                "this rank alone. Make it with max_norm=None; to hold norms down, rewrite the "
                "whole weight after each step, on all ranks, as torch.renorm(weight, p, 0, "
                "max_norm) does."
            )


def refuse_orders(model: Any, strategy: Any) -> None:
    """Raise LockstepError unless the parameters have the same order on all ranks. Collective.

    Args:
      model: The model.
      strategy: The strategy.
    """
    lockstep, call = strategy.replicas.lockstep, "replicate, the order of parameters"
    named = model.named_parameters()
    local_order = "\n".join(
        f"{n!r}, {'trained' if p.requires_grad else 'frozen'}" for n, p in named
    ).encode()
    if len(set(lockstep.gather_payloads(call, xxh3_128_digest(local_order)))) == 1:
        return
    first, *other_orders = [
        payload.decode().split("\n") for payload in lockstep.gather_payloads(call, local_order)
    ]
    rank, i = next(
        (rank, i)
        for rank, order in enumerate(other_orders, 1)
        for i, entry in enumerate(order)
        if entry != first[i]
    )
    lockstep.fail(
        LockstepError(
            "replicate: the order of the parameters differs between ranks, and gradients are "
            f"reduced in that order: number {i} is {first[i]}, on rank {lockstep.ranks[0]}, and "
            f"{other_orders[rank - 1][i]}, on rank {lockstep.ranks[rank]}. Make, and freeze, the "
            "modules in the same order on all ranks. A set of names has a different order in each "
            "process; sorted(names) does not."
        )
    )
