"""The parameters of a model, the buffers of their gradients, and checks that they stay the same."""

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
from mpistrat.strategy.strategy import Strategy
from mpistrat.torch.tensors import as_array, as_tensor, permute_to_storage_order
from mpistrat.torch.views import is_plain, view_bytes

__all__ = ["GradientBuffers", "check_modules", "check_parameter_order"]

_get_address, _get_traits = torch.Tensor.data_ptr, operator.attrgetter("requires_grad", "dtype")
_chain, _get_values = itertools.chain.from_iterable, operator.methodcaller("values")

# The number of elements in a sample of a gradient: each may be a cache miss.
_SAMPLES = 32

_all_buffers: weakref.WeakSet[GradientBuffers] = weakref.WeakSet()


def _drop_all_after_fork() -> None:
    for buffers in list(_all_buffers):
        buffers.drop_after_fork()


os.register_at_fork(after_in_child=_drop_all_after_fork)


@final
class GradientBuffers:
    """The parameters that require grad at the start, and the buffers of their gradients.

    Args:
      model: The model.

    Attributes:
      names: The names of the parameters.
      params: The parameters.
      arrays: The buffers of their gradients, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
    """

    def __init__(self, model: torch.nn.Module):
        """Record the parameters; `allocate` takes the memory."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self._model, self._dtypes = model, {p: p.dtype for p in self.params}
        self._is_lost = False
        self._record_modules()

    def allocate(self, strategy: Strategy, c_order: bool) -> list[Any]:
        """Allocate memory that the ranks of a node share. Collective.

        Args:
          strategy: The strategy.
          c_order: Whether all buffers have C order; else the order of the parameters.

        Returns:
          Tensors of `Strategy.gradient_buffers`; the last has a number for each parameter.
        """
        tensors = [p.detach().contiguous() if c_order else p.detach() for p in self.params]
        ordered_tensors = list(map(permute_to_storage_order, tensors))
        self._permutations = [permutation for _, permutation in ordered_tensors]
        buffers = strategy.gradient_buffers(
            [*[tensor for tensor, _ in ordered_tensors], torch.empty(len(ordered_tensors))]
        )
        self.arrays = list(map(as_array, buffers[:-1]))
        self.views = [
            buffer.permute(permutation)
            for buffer, permutation in zip(buffers, self._permutations, strict=False)
        ]
        self._addresses = [view.data_ptr() for view in self.views]
        self._samples = [_take_sample(array) for array in self.arrays]
        # The gradients of a large model leave the caches before they are read.
        is_large = sum(array.nbytes for array in self.arrays) >= MIN_UNCACHED_NBYTES
        self._stream_flags = [is_large and is_plain(view) for view in self.views]
        self._check_lockstep = strategy._replicas.lockstep.check
        _all_buffers.add(self)
        return list(buffers)

    def read_samples(self) -> bytes:
        """Return some elements of each buffer, which show most writes to it."""
        if not self._samples:
            return b""
        return np.concatenate(self._samples, dtype=np.float64).tobytes()

    def find_written_name(self, earlier_samples: bytes) -> str | None:
        """Return the name of a parameter whose buffer was written to since; None without one."""
        current_samples = self.read_samples()
        if current_samples == earlier_samples:
            return None
        pairs = zip(
            np.frombuffer(current_samples, np.int64),
            np.frombuffer(earlier_samples, np.int64),
            strict=True,
        )
        first_index = next(i for i, (x, y) in enumerate(pairs) if x != y)
        ends = np.cumsum([sample.size for sample in self._samples])
        name: str = self.names[int(np.searchsorted(ends, first_index, side="right"))]
        return name

    def drop_after_fork(self) -> None:
        """Drop the gradient memory, which does not exist in a forked process."""
        self._is_lost = True
        for p, view in zip(self.params, self.views, strict=True):
            p.grad = None if p.grad is view else p.grad

    def check_gradient(self, i: int, gradient: torch.Tensor) -> None:
        """Raise if a gradient cannot be reduced with the gradients of other ranks.

        Raises:
          StrategyError: This process was forked.
          LeafTypeError: The gradient is sparse.
          ContextError: The gradient was made with ``create_graph=True``.
        """
        if self._is_lost:
            self._check_lockstep()
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

    def copy_gradient(self, i: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to its buffer, which the ranks reduce."""
        view = self.views[i]
        if self._stream_flags[i] and is_plain(gradient) and gradient.dtype is view.dtype:
            copy_to(view_bytes(view), view_bytes(gradient))
        else:
            view.copy_(gradient)

    def restore_views(self) -> None:
        """Replace views whose memory a module has changed, by ``model.share_memory()``."""
        if [*map(_get_address, self.views)] == self._addresses:
            return
        for i, address in enumerate(self._addresses):
            if self.views[i].data_ptr() != address:
                self.views[i] = as_tensor(self.arrays[i]).permute(self._permutations[i])

    def check_no_shared_memory(self, call_name: str) -> None:
        """Raise LeafTypeError if one of the parameters has memory of another one, or of a buffer.

        Args:
          call_name: The call that moves each parameter to memory of its own.
        """
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        named = sorted((x for x in named if x[1].numel()), key=lambda x: x[1].data_ptr())
        arrays_by_address = [
            (as_array(tensor.detach()), name, tensor in self._dtypes) for name, tensor in named
        ]
        for i, (array, name, is_parameter) in enumerate(arrays_by_address):
            for other_array, other_name, is_other_parameter in arrays_by_address[i + 1 :]:
                if not np.may_share_memory(array, other_array):  # nor with any that begins later
                    break
                if (is_parameter or is_other_parameter) and np.shares_memory(array, other_array):
                    raise LeafTypeError(
                        f"{call_name}: {name!r} and {other_name!r} are views of the same memory, "
                        "and each would be moved to memory of its own. To tie weights, make them "
                        "one torch.nn.Parameter under two names, or use an optimizer of "
                        "torch.optim."
                    )

    def _record_modules(self) -> None:
        """Record the modules and parameters of the model; each call of the model compares them."""
        modules = self._model.named_modules()
        named_mappings = [(name, d) for name, m in modules for d in (m._parameters, m._modules)]
        self._mappings = [d for _, d in named_mappings]
        self._module_entries = [
            (d, key, f"{name}.{key}".lstrip("."), tensor_or_module)
            for name, d in named_mappings
            for key, tensor_or_module in d.items()
        ]
        self._keys, self._values = (
            [key for _, key, *_ in self._module_entries],
            [x for *_, x in self._module_entries],
        )
        self._tensors = [
            tensor_or_module
            for tensor_or_module in self._values
            if isinstance(tensor_or_module, torch.Tensor)
        ]
        self._tensor_traits = [*map(_get_traits, self._tensors)]

    def _find_change(self) -> tuple[str, Any]:
        """Return the name and value of an entry that has changed since `_record_modules`.

        Without a change the name is "".
        """
        # Each call of the model asks, so this goes over all parts in built-in functions.
        values = [*_chain(map(_get_values, self._mappings))]
        is_unchanged = [*_chain(self._mappings)] == self._keys and all(
            map(operator.is_, values, self._values)
        )
        if is_unchanged and [*map(_get_traits, self._tensors)] == self._tensor_traits:
            return "", None
        tensor_traits = dict(zip(self._tensors, self._tensor_traits, strict=True))
        for mapping, key, name, tensor_or_module in self._module_entries:
            current_entry = mapping.get(key)
            if current_entry is not tensor_or_module or (
                tensor_or_module in tensor_traits
                and _get_traits(tensor_or_module) != tensor_traits[tensor_or_module]
            ):
                return name, current_entry
        known_keys = {(id(mapping), key) for mapping, key, *_ in self._module_entries}
        added = (
            key
            for mapping in self._mappings
            for key in mapping
            if (id(mapping), key) not in known_keys
        )
        return next(added, ""), None

    def find_changed_name(self) -> str:
        """Return the name of a part of the model with other parameters by now; "" without one."""
        name, _ = self._find_change()
        if name and self._dtypes == {
            p: p.dtype for p in self._model.parameters() if p.requires_grad
        }:
            self._record_modules()
            return ""
        return name

    def check_parameters(self) -> bool:
        """Return whether rows can be counted: not in transforms of torch.func, nor in torch.export.

        Raises:
          ContextError: The model has other parameters than at the start.
        """
        name, current_entry = self._find_change()
        if (
            isinstance(current_entry, FakeTensor)
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return False
        if not name or type(current_entry) is torch.Tensor:  # in torch.func.functional_call
            return True
        changed_name = self.find_changed_name()
        if changed_name:
            raise ContextError(
                f"{changed_name!r} was replaced (setattr, load_state_dict(assign=True)), added, "
                "removed, cast, frozen or unfrozen after replicate, so gradients would stay on "
                "this rank. Call mpistrat.torch.replicate(model) again, on all ranks."
            )
        return True


def _take_sample(array: Array) -> Array:
    """Return a view of some elements of an array, or of all if it is small."""
    step = array.size // _SAMPLES
    return array.reshape(-1)[:: step | 1] if step > 1 else array.reshape(-1)


def check_modules(model: torch.nn.Module, rank_count: int) -> None:
    """Raise LeafTypeError if a module has weights that cannot stay the same on all ranks.

    Args:
      model: The model.
      rank_count: How many ranks there are.
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
        is_embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if (
            rank_count > 1
            and is_embedding
            and module.max_norm is not None
            and module.weight.requires_grad
        ):
            raise LeafTypeError(
                f"{f'{name}.weight'.lstrip('.')!r} is of an embedding with max_norm="
                f"{module.max_norm:g}: each call of it rewrites the rows that are looked up, on "
                "this rank alone. Make it with max_norm=None; to hold norms down, rewrite the "
                "whole weight after each step, on all ranks, as torch.renorm(weight, p, 0, "
                "max_norm) does."
            )


def check_parameter_order(model: torch.nn.Module, strategy: Strategy) -> None:
    """Raise LockstepError unless the parameters have the same order on all ranks. Collective.

    Args:
      model: The model.
      strategy: The strategy.
    """
    lockstep, call = strategy._replicas.lockstep, "replicate, the order of parameters"
    named = model.named_parameters()
    local_order = "\n".join(
        f"{n!r}, {'trained' if p.requires_grad else 'frozen'}" for n, p in named
    ).encode()
    if len(set(lockstep.gather_payloads(call, xxh3_128_digest(local_order)))) == 1:
        return
    first_order, *other_orders = [
        payload.decode().split("\n") for payload in lockstep.gather_payloads(call, local_order)
    ]
    rank, i = next(
        (rank, i)
        for rank, order in enumerate(other_orders, 1)
        for i, entry in enumerate(order)
        if entry != first_order[i]
    )
    lockstep.raise_on_all_ranks(
        LockstepError(
            "replicate: the order of the parameters differs between ranks, and gradients are "
            f"reduced in that order: number {i} is {first_order[i]}, on rank {lockstep.ranks[0]}, "
            f"and {other_orders[rank - 1][i]}, on rank {lockstep.ranks[rank]}. Make, and freeze, "
            "the modules in the same order on all ranks. A set of names has a different order in "
            "each process; sorted(names) does not."
        )
    )
