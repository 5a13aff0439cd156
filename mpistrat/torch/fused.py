"""`FusedOptimizer`: optimizers of `mpistrat.optim` for models, with weights once per node.

The weights are variables in node-shared memory, and the parameters of each rank are in a private
mapping of its pages (`NodeStorage`): a write by the program makes a copy of the page, which the
page table shows before the next update. Small weights, and all weights where memory is not shared,
are each rank's own. The digests of small weights are compared in each step, and one of the other
weights every ``MPISTRAT_CHECK_EVERY`` steps.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, final

import numpy as np
import torch
import xxhash

from mpistrat.errors import ContextError, LeafTypeError
from mpistrat.lockstep.guards import warn
from mpistrat.optim.base import Progress
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.state import State
from mpistrat.shm.private_mapping import can_detect_writes
from mpistrat.shm.storage import MIN_SHARED_NBYTES, NodeStorage
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.context_stack import enter_replica
from mpistrat.torch.ddp.replicate import gradients_of
from mpistrat.torch.ddp.stepping import check_same_values
from mpistrat.torch.param_groups import ParamGroups
from mpistrat.torch.process_group.channel import record_call
from mpistrat.torch.states import collect_group_numbers
from mpistrat.torch.tensors import as_array, as_tensor
from mpistrat.variables.variable import Variable

__all__ = ["FusedOptimizer"]

_SCALER_STEP = torch.amp.GradScaler.step.__code__

_STALE_GRADIENTS = (
    "FusedOptimizer.step: there was no backward pass of the model since the last step() or "
    "zero_grad(), and gradients that are still there are used up. Call loss.backward() before each "
    "step(); gradients that the program sets itself are for apply_gradients of mpistrat.optim."
)
_GROUPS = (
    "FusedOptimizer.add_param_group: its parameters are those of the model that replicate has "
    "returned, and its groups are those of its optimizer: mpistrat.optim.AdamW(1e-3, "
    "groups=[mpistrat.optim.Group('*bias*', weight_decay=0.0)])."
)
_UNSCALED = (
    "GradScaler.unscale_ has divided gradients that are this rank's own, and norms are not "
    "those of the model. Leave unscale_ and clip_grad_norm_ out, and clip by the optimizer: "
    "clip=mpistrat.optim.ClipByGlobalNorm(...)."
)
# The key of the counters of `mpistrat.optim` in a state_dict.
_COUNTERS = "mpistrat"
# Slots that an optimizer of PyTorch has, by their names there; others keep their own.
_TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
_TORCH_NAMES |= {"mean_square": "square_avg", "mean": "grad_avg"}  # of RMSprop
_COPIED = ("ema",)  # slots that do not begin with zeros
_get_address = torch.Tensor.data_ptr


@final
class FusedOptimizer(torch.optim.Optimizer):
    """Updates a replicated model by an optimizer of `mpistrat.optim`.

    Weights move to memory that the ranks of a node share; each rank maps it. ``step()`` reduces the
    gradients of all ranks and updates weights and state in one pass over memory, of which each rank
    does a part; then every rank sees the new weights. A backward pass does not communicate, and
    ``p.grad`` stays this rank's own gradient: to clip, use ``clip=`` of the optimizer. Weights are
    in C order from then on, as in checkpoints, also those that were ``channels_last``.

    If the program writes to a weight, only this rank's copy changes, and the next ``step()`` raises
    an error that names the parameter. A step of an optimizer of ``torch.optim`` that has some of
    the parameters raises an error on all ranks.

    It is an optimizer of PyTorch too. Its ``param_groups`` have the numbers of the optimizer by
    PyTorch's names (``lr``, ``weight_decay``, ``betas``, ``eps``, ``momentum``), one group for each
    of its groups of variables. Changes count at the next step, and are the same on all ranks. So
    schedulers of PyTorch work, unless ``learning_rate`` is a schedule of `mpistrat.optim`; so do
    hooks, closures, and ``torch.amp.GradScaler`` without ``unscale_``. ``state_dict`` and
    ``load_state_dict`` have the whole state, at any number of ranks.

    Collective: all ranks create it, with the same optimizer.

    Args:
      model: The result of `replicate`.
      optimizer: An optimizer of `mpistrat.optim`, such as ``mpistrat.optim.AdamW(1e-3)``, with its
        schedules, groups, clipping, averages and ``shard="all"``.

    Attributes:
      optimizer: The optimizer of `mpistrat.optim`.
      variables: The weights by the names that the model gives them. Each rank has a copy of small
        ones.

    Raises:
      TypeError: `model` is not replicated, or `optimizer` is not of `mpistrat.optim`.
      LeafTypeError: A parameter that requires grad is neither float32 nor float64, or shares
        memory with another parameter or a buffer.
      LockstepError: The ranks have other models or optimizers.

    Warns:
      RuntimeWarning: ``/proc/self/pagemap`` cannot be read on a node, so each rank has its own
        copy of weights and state; ``MPISTRAT_MAP_PRIVATE=0`` asks for that, without a warning.

    Cost: one copy of the weights, and the state.

    Example:
      >>> import mpistrat as ms
      >>> from mpistrat.torch.ddp.replicate import replicate
      >>> model = replicate(torch.nn.Linear(2, 1), ms.OneDeviceStrategy("cpu"))
      >>> optimizer = FusedOptimizer(model, ms.optim.SGD(0.5))
      >>> before = model.weight.detach().clone()
      >>> model(torch.ones(4, 2)).mean().backward()
      >>> optimizer.step()
      >>> bool((model.weight < before).all())
      True
    """

    _reduces_gradients = True  # so `stepping` does not check its steps
    _step_supports_amp_scaling = True
    found_inf: Any
    grad_scale: Any
    param_groups: Any
    state: Any

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer):
        """Move the weights, and create the state."""
        self._gradients = gradients = gradients_of(model, "FusedOptimizer")
        candidate: Any = optimizer
        if not isinstance(candidate, Optimizer):
            class_name = candidate if isinstance(candidate, type) else type(candidate).__name__
            raise TypeError(
                f"FusedOptimizer: {class_name} is not an optimizer of mpistrat.optim, "
                "such as mpistrat.optim.AdamW(1e-3). One of torch.optim needs no FusedOptimizer."
            )
        self.optimizer, self._step_count = optimizer, 0
        strategy = gradients.strategy
        with strategy.scope():
            with strategy._replicas.lockstep.validating_collectively("FusedOptimizer"):
                params_by_name = dict(zip(gradients.names, gradients.params, strict=True))
                self._optimizer_groups = ParamGroups(optimizer, params_by_name)
                super().__init__(self._optimizer_groups.groups, self._optimizer_groups.defaults)
                _check_dtypes(params_by_name)
                gradients.check_no_shared_memory("FusedOptimizer")
            gradients.is_reduction_deferred = True
            has_other_orders = not all(p.is_contiguous() for p in gradients.params)
            if strategy.all_reduce("MAX", int(has_other_orders)):
                gradients.allocate_buffers()
            copies = strategy._replicas.reducer.node.arena.copies
            copies.is_sharing_allowed = self._agree_on_private_mappings()
            try:
                self.variables = {
                    name: _move_to_variable(name, p)
                    for name, p in zip(gradients.names, gradients.params, strict=True)
                }
                self._optimizer_groups.optimizer.build(self.variables.values())
            finally:
                copies.is_sharing_allowed = True
        update_targets = self._state.targets
        settings_by_name = {
            name: update_targets[variable._number].optimizer
            for name, variable in self.variables.items()
        }
        self._optimizer_groups.bind_settings(settings_by_name, self.param_groups)
        self._record_weights()
        gradients.on_weights_renewed = self._take_renewed_weights

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients of all ranks, and update weights and state.

        Collective: all ranks call it, after as many backward passes.

        Args:
          closure: None; or a function that makes the backward passes, which all ranks give.

        Returns:
          The result of `closure`, this rank's loss; None without a closure.

        Raises:
          ContextError: A weight was written to on this rank, or replaced, gradients were changed
            after the backward pass, or other parameters require grad than at the start; or there
            are gradients, but no backward pass since the last step; or a schedule of
            `mpistrat.optim` and something else set the learning rate. Without gradients nothing
            happens.
          LockstepError: The numbers in ``param_groups`` differ between ranks.
          ValueError: One of them is not a number that the optimizer takes.
          NonFiniteError: A gradient is NaN or infinite; see `mpistrat.optim.Optimizer`.
          RemoteError: Another rank failed.

        Cost: the cost of ``apply_gradients``, one small reduction of which parameters have
        gradients, and a look at the page table, 1.5 ms for 100 MB.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients.strategy._replicas.lockstep.check()
        replica = enter_replica(self._gradients.strategy, "FusedOptimizer.step")
        with record_call("FusedOptimizer.step"), replica, torch.no_grad():
            self._update()
        torch.autograd.graph.increment_version(self._gradients.params)
        self._gradients.reset_accumulation()
        return loss

    def _update(self) -> None:
        """Reduce and update, unless a scaler of the loss has found an overflow on some rank."""
        gradients = self._gradients
        group = gradients.strategy._replicas
        with group.lockstep.validating_collectively("FusedOptimizer.step"):
            gradients.check_parameters()
            if gradients.accumulation_error is not None:
                raise gradients.accumulation_error
            is_scaled = hasattr(self, "found_inf")
            if is_scaled and self.grad_scale is None:
                raise ContextError(_UNSCALED)
            self._check_weights(is_scaled)
            has_overflow = is_scaled and float(self.found_inf) > 0
            self._optimizer_groups.apply_changes(self, group.lockstep)
            small_digest = self._compute_small_digest()
            local_values = [
                *gradients.fill_buffers(),
                gradients.pass_count,
                has_overflow,
                small_digest,
                -small_digest,
            ]
        flags = np.array(local_values, np.int32)
        *used_flags, pass_count, has_overflow, digest_maximum, negated_minimum = all_reduce_tree(
            group, "MAX", flags, None, None
        ).tolist()
        self._compare_unshared_weights(digest_maximum != -negated_minimum)
        if any(used_flags) and not pass_count:
            group.lockstep.raise_on_all_ranks(ContextError(_STALE_GRADIENTS))
        if has_overflow:
            _report_overflow(self)
        elif any(used_flags):
            gradients.scale_buffers(pass_count)
            if is_scaled:
                for view in gradients.views:
                    view /= self.grad_scale
            pairs = zip(gradients.arrays, self.variables.values(), used_flags, strict=True)
            updates = [(array if is_used else None, variable) for array, variable, is_used in pairs]
            self._optimizer_groups.optimizer.apply_gradients(updates, weight=gradients.weight)
            self._optimizer_groups.write_learning_rates(self.param_groups, self._state)

    def flush(self) -> None:
        """Make the update of a window of `accumulate` that is not full; see `Optimizer.flush`.

        Collective: all ranks call it.
        """
        with enter_replica(self._gradients.strategy, "FusedOptimizer.flush"), torch.no_grad():
            self._optimizer_groups.optimizer.flush()
        torch.autograd.graph.increment_version(self._gradients.params)

    def discard(self) -> None:
        """Drop the gradients in a window of `accumulate`; see `Optimizer.discard`. Collective."""
        with enter_replica(self._gradients.strategy, "FusedOptimizer.discard"):
            self._optimizer_groups.optimizer.discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Args:
          set_to_none: Set ``p.grad`` to None; else to zeros.
        """
        for p in self._gradients.params:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()
        self._gradients.reset_accumulation()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ContextError, except during the constructor: groups belong to `optimizer`."""
        if "variables" in self.__dict__:
            raise ContextError(_GROUPS)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, in the format of PyTorch's optimizer of the same class.

        It also has averages and other slots that PyTorch's optimizer does not have, and the
        counters of `mpistrat.optim`. Collective with ``shard="all"``.

        Cost: a copy of the state.
        """
        pairs = zip(self._gradients.params, self.variables.values(), strict=True)
        with self._gradients.strategy.scope():
            self.state.update({p: _copy_state(self._state, variable) for p, variable in pairs})
        try:
            saved = super().state_dict()
        finally:
            self.state.clear()
        return {**saved, _COUNTERS: self._state.progress._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, or that of PyTorch's optimizer of the same class.

        Collective: all ranks give the same.

        Raises:
          ValueError: The state has other groups, slots or shapes.
          LockstepError: The ranks have given other values.
        """
        state, lockstep = self._state, self._gradients.strategy._replicas.lockstep
        variables, params = self.variables.values(), self._gradients.params
        with self._gradients.strategy.scope():
            with lockstep.validating_collectively("FusedOptimizer.load_state_dict"):
                if not {"state", "param_groups"} <= set(state_dict):
                    raise ValueError(
                        "FusedOptimizer.load_state_dict: expected what state_dict() returned, with "
                        f"'state' and 'param_groups', not a dict of {sorted(map(str, state_dict))}."
                    )
                progress, groups = _read_progress(state_dict, state.progress), self.param_groups
                try:
                    super().load_state_dict(state_dict)
                    pairs = zip(params, variables, strict=True)
                    values = [
                        _read_slot_values(state, variable, self.state.get(p, {}))
                        for p, variable in pairs
                    ]
                except BaseException:
                    self.param_groups = groups
                    raise
                finally:
                    self.state = defaultdict(dict)
            lockstep.handshake(f"FusedOptimizer.load_state_dict of {progress}")
            for variable, slots in zip(variables, values, strict=True):
                for name, value in slots.items():
                    state.targets[variable._number].slots[name].assign(value)
            state.store_progress(progress)
        self._optimizer_groups.write_learning_rates(self.param_groups, state)

    def tree(self) -> dict[str, Any]:
        """Return the state and the groups for a checkpoint, without the weights."""
        groups = collect_group_numbers(self)
        for i in self._optimizer_groups.scheduled:  # the number of steps gives the rate
            del groups[str(i)]["lr"]
        tree = self.optimizer.tree()
        tree["groups"] = groups
        return tree

    @property
    def _state(self) -> State:
        states: dict[Any, State] = self._optimizer_groups.optimizer._states
        return states[self._gradients.strategy]

    def _check_weights(self, is_scaled: bool) -> None:
        """Raise ContextError if a weight has other memory, or has been written to.

        Args:
          is_scaled: A scaler of the loss has looked at the gradients.
        """
        gradients = self._gradients
        if self._is_stale():
            raise ContextError(
                "this FusedOptimizer is not that of the model any more: another was made of it, "
                "or other parameters require grad than then, or of another dtype, or replicate "
                "was called with another strategy. Make another one."
            )
        # A scaler looks for infinities by a multiplication by 1, in place.
        change = gradients.explain_change(counts_versions=not is_scaled)
        if change is not None:
            raise change
        name = _find_mismatch(
            gradients.names, map(_get_address, gradients.params), self._weight_addresses
        )
        if name is not None:
            raise _create_parameter_error(name, "was given other memory (p.data = ...)")
        for name, storage in self._shared_storages:
            if storage.has_private_writes():
                raise _create_parameter_error(
                    name, "was written to by something else than this optimizer"
                )

    def _compute_small_digest(self) -> int:
        """Return the digest of small weights, of which each rank has a copy."""
        digest = xxhash.xxh3_64()
        for array in self._small_arrays:
            digest.update(array.data)
        return digest.intdigest() >> 33

    def _compare_unshared_weights(self, has_differences: bool) -> None:
        """Compare weights of which each rank has a copy. Collective.

        Args:
          has_differences: Whether small weights differ; equal on all ranks. If not, one of the
            other weights is compared from time to time.
        """
        group = self._gradients.strategy._replicas
        interval, self._step_count = group.lockstep.options.check_every, self._step_count + 1
        local_variables = self._unshared_variables
        names = list(local_variables) if has_differences else []
        if not has_differences and interval and self._step_count % interval == 0:
            large_names = [
                n
                for n, v in local_variables.items()
                if v._storage.array.nbytes >= MIN_SHARED_NBYTES
            ]
            names = large_names and [large_names[self._step_count // interval % len(large_names)]]
        if names:
            check_same_values(
                group,
                {name: local_variables[name]._component() for name in names},
                "Something else than this FusedOptimizer has written to it. Set weights on all "
                "ranks, and call mpistrat.torch.replicate(model) again, which gives all of them "
                "replica 0's.",
            )

    def _agree_on_private_mappings(self) -> bool:
        """Return whether all ranks can map weights privately and see writes to them. Collective."""
        strategy = self._gradients.strategy
        lockstep = strategy._replicas.lockstep
        if not lockstep.options.map_private:
            return False
        all_can = bool(strategy.all_reduce("MIN", int(can_detect_writes())))
        if not all_can:
            warn(
                lockstep,
                "FusedOptimizer",
                "/proc/self/pagemap, which tells what a rank has written to, cannot be read on "
                "every node. So each rank has its own copy of the weights and their state, and "
                "what a rank writes to a weight itself is found only when a copy is compared, "
                "every MPISTRAT_CHECK_EVERY steps.",
                RuntimeWarning,
            )
        return all_can

    def _is_stale(self) -> bool:
        """Return whether the model has other weights than these variables; equal on all ranks."""
        gradients = self._gradients
        if gradients.on_weights_renewed != self._take_renewed_weights:
            return True
        if gradients.params is self._params:  # `Gradients.check_parameters` checks these
            return False
        current_dtypes = {
            n: str(p.dtype)[6:] for n, p in zip(gradients.names, gradients.params, strict=True)
        }
        return current_dtypes != {
            name: variable.dtype.name for name, variable in self.variables.items()
        }

    def _take_renewed_weights(self) -> None:
        """Copy the weights that `replicate` has given to all ranks. Collective."""
        gradients = self._gradients
        if self._is_stale():  # the program makes another optimizer, else `step` raises
            gradients.variables_by_id, gradients.is_reduction_deferred = {}, False
            return
        with gradients.strategy.scope():
            pairs = zip(gradients.params, self.variables.values(), strict=True)
            for p, variable in pairs:
                value = p.detach().contiguous().numpy().copy()
                if isinstance(variable._storage, NodeStorage):
                    variable._storage.discard_private()
                variable.assign(value)
                p.data = _view_as_tensor(variable)
        self._record_weights()

    def _record_weights(self) -> None:
        """Record the addresses of the weights, and give checkpoints the variables."""
        self._params = params = self._gradients.params
        self._weight_addresses = [*map(_get_address, params)]
        self._gradients.variables_by_id = dict(
            zip(map(id, params), self.variables.values(), strict=True)
        )
        stored = {name: variable._storage for name, variable in self.variables.items()}
        self._shared_storages = [
            (n, storage) for n, storage in stored.items() if isinstance(storage, NodeStorage)
        ]
        self._unshared_variables = {
            n: v for n, v in self.variables.items() if not isinstance(v._storage, NodeStorage)
        }
        self._small_arrays = [
            storage.array for storage in stored.values() if storage.array.nbytes < MIN_SHARED_NBYTES
        ]


def _check_dtypes(params_by_name: dict[str, Any]) -> None:
    for name, p in params_by_name.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise LeafTypeError(
                f"FusedOptimizer: parameter {name!r} is {p.dtype}; it updates float32 and float64. "
                "Keep weights in float32, and compute in torch.autocast('cpu', "
                "dtype=torch.bfloat16)."
            )


def _report_overflow(optimizer: torch.optim.Optimizer) -> None:
    """Record in the scaler that calls ``step`` that gradients of some rank overflow.

    The scaler decides by the gradients of this rank, and all ranks need the same scale.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SCALER_STEP:
        frame = frame.f_back
    if frame is not None:
        scaler_state = frame.f_locals["self"]._per_optimizer_states[id(optimizer)]
        for overflow in scaler_state["found_inf_per_device"].values():
            overflow.fill_(1.0)


def _find_mismatch(
    names: list[str], addresses: Iterable[int], expected_addresses: list[int]
) -> str | None:
    """Return the first name whose number is not the expected one; None if there is none."""
    address_list = [*addresses]
    if address_list == expected_addresses:
        return None
    return next(
        (n for n, x, y in zip(names, address_list, expected_addresses, strict=False) if x != y),
        None,
    )


def _move_to_variable(name: str, p: torch.nn.Parameter) -> Variable:
    """Return a variable with the values of a parameter, whose memory becomes the variable's."""
    variable = Variable(as_array(p.detach().contiguous()), name=name)
    p.data = _view_as_tensor(variable)
    return variable


def _view_as_tensor(variable: Variable) -> Any:
    storage = variable._storage
    if isinstance(storage, NodeStorage):
        return as_tensor(storage.map_private().reshape(variable.shape))
    return as_tensor(storage.array)


def _create_parameter_error(name: str, problem: str) -> ContextError:
    return ContextError(
        f"parameter {name!r} {problem} on this rank, so its weights are not the ones of the other "
        "ranks. To set weights, do it on all ranks and call mpistrat.torch.replicate(model) again, "
        "which gives all of them replica 0's, or use an optimizer of torch.optim."
    )


def _copy_state(state: State, variable: Variable) -> dict[str, Any]:
    """Return a copy of the state of one variable. Collective with ``shard="all"``.

    Args:
      state: The state of the optimizer.
      variable: A variable that it updates.
    """
    slots = state.targets[variable._number].slots
    tensors = {_TORCH_NAMES.get(name, name): as_tensor(slots[name].numpy()) for name in slots}
    return {"step": torch.tensor(float(state.progress.step)), **tensors}


def _read_slot_values(state: State, variable: Variable, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the slots of one variable, by name. Never communicates.

    Args:
      state: The state of the optimizer.
      variable: A variable that it updates.
      saved: The result of `_copy_state`, or the state of an optimizer of PyTorch; empty for a
        fresh state.

    Raises:
      ValueError: A slot is missing, or has another shape.
    """
    values = {}
    for name in state.targets[variable._number].slots:
        torch_name = _TORCH_NAMES.get(name, name)
        value = saved.get(torch_name)
        if value is None and (saved or name in _COPIED):
            raise ValueError(
                f"FusedOptimizer.load_state_dict: {torch_name!r} of {variable.name!r} is not in "
                "it. Load the state of an optimizer of the same class and options."
            )
        shape = variable.shape
        array = (
            np.zeros(shape, variable.dtype)
            if value is None
            else as_array(value.detach(), torch_name)
        )
        if array.shape != shape:
            raise ValueError(
                f"FusedOptimizer.load_state_dict: {torch_name!r} of {variable.name!r} has shape "
                f"{array.shape}; expected {shape}."
            )
        values[name] = array
    return values


def _read_progress(saved: Mapping[str, Any], current_progress: Progress) -> Progress:
    """Return the counters in a ``state_dict``; from one of PyTorch only the steps.

    Args:
      saved: The ``state_dict``.
      current_progress: The counters now, for counters that the ``state_dict`` does not have.
    """
    counters = saved.get(_COUNTERS)
    if counters is not None:
        return Progress(**counters)
    steps = [
        int(param_state["step"]) for param_state in saved["state"].values() if "step" in param_state
    ]
    return current_progress._replace(step=max(steps, default=0), calls=0, weight=0.0)
