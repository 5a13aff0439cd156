"""`Checkpoint`: the state of a program, saved and restored by all ranks together.

An empty `Checkpoint` that is restored keeps the values of the file for the trees that are attached
later (`DeferredRestore`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from mpistrat.arrays import check_bool
from mpistrat.checkpoint import atomic, files, restoring, saving, tree
from mpistrat.checkpoint.background import BackgroundSaver
from mpistrat.checkpoint.format import NO_METRICS
from mpistrat.checkpoint.restoring import LIBRARY_COUNTERS, Restored
from mpistrat.checkpoint.tree import (
    SavedOptimizer,
    describe_option_changes,
    reset_missing_state,
    warn_of_option_changes,
)
from mpistrat.checkpoint.values import VALUES_NAME, ProgramValues, make_cell
from mpistrat.comm import mpi
from mpistrat.comm.callsite import shorten
from mpistrat.comm.session import known_job_size
from mpistrat.config import rank_text
from mpistrat.errors import ContextError, StrategyError, StructureError
from mpistrat.lockstep.ending import get_exit_code
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.context_stack import current_context, enter_cross_replica
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables.kinds import SINGLE_REPLICA
from mpistrat.variables.variable import Variable
from mpistrat.watchdog.status_board import say


def is_in_tree(name: str, key: str) -> bool:
    """Return whether a name of a file is that of the tree `key`, or of something in it.

    Example:
      >>> [is_in_tree(name, "model") for name in ("model/w", "model", "models/w")]
      [True, True, False]
    """
    return f"{name}/".startswith(f"{key}/")


@final
class DeferredRestore:
    """The part of a file that is still to be restored.

    Attributes:
      path: The file.
      status: The result of `Checkpoint.restore`; each attached tree changes it.
    """

    def __init__(self, status: Restored, lockstep: Lockstep):
        """Wait for trees; at the end of the program name the values that no tree has taken.

        Args:
          status: As the attribute.
          lockstep: The ranks; the first of them names it.
        """
        self.path, self.status = Path(status.path or ""), status
        comm = lockstep.session.comm
        # A strategy of one rank alone, outside of all scopes, is there on every rank of a job.
        is_rank_of_job = comm.name == mpi.MPIComm.name or rank_text() in ("", "0")
        self._is_reporter, self._is_reported = comm.rank == 0 and is_rank_of_job, False
        atexit.register(self._report_at_exit)

    def has_values_for(self, key: str) -> bool:
        """Return whether the file has something for the tree `key` that nothing has taken yet."""
        return any(is_in_tree(name, key) for name in self.status.unused)

    def select_waiting(
        self, key: str, entries: Mapping[str, Any], stateful: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what of the tree `key` was not restored yet.

        Args:
          key: The tree.
          entries: All entries of the checkpoint.
          stateful: Its objects with ``restore_state``.
        """

        def is_waiting(name: str) -> bool:
            return is_in_tree(name, key) and name not in self.status.matched

        waiting_entries = {name: entry for name, entry in entries.items() if is_waiting(name)}
        values = (
            entries[VALUES_NAME].program_values.values_by_name if VALUES_NAME in entries else {}
        )
        values = {name: value for name, value in values.items() if is_waiting(name)}
        if values:
            waiting_entries[VALUES_NAME] = ProgramValues(values).make_cell()
        names = [*waiting_entries, *values]
        waiting_stateful = {
            begin: stateful_pair
            for begin, stateful_pair in stateful.items()
            if any(is_in_tree(name, begin) for name in names)
        }
        return waiting_entries, waiting_stateful

    def check_attach_order(self, key: str, optimizers: Sequence[SavedOptimizer]) -> None:
        """Raise StructureError if an optimizer is attached before its variables.

        The file names its slots by the places of the variables, which have none yet.

        Args:
          key: The tree that is attached.
          optimizers: All optimizers of the checkpoint.
        """
        for optimizer in optimizers:
            waiting = [
                name for name in self.status.unused if name.startswith(f"{optimizer.path}/slots/")
            ]
            known_names = {*self.status.unused, *self.status.matched}
            if (
                is_in_tree(optimizer.path, key)
                and waiting
                and not known_names.issuperset(optimizer.slots)
            ):
                raise StructureError(
                    f"{optimizer.text} was attached as {optimizer.path!r} before its variables, "
                    f"and {self.path} has its slots by their places: "
                    f"{', '.join(shorten(waiting))}. "
                    "Attach the variables first, by the names that they were saved under."
                )

    def record_tree_status(self, tree_status: Restored) -> None:
        """Record which values a tree has taken, and which of its names the file lacks."""
        status = self.status
        status.unused = tuple(name for name in status.unused if name not in tree_status.matched)
        status.matched += tree_status.matched
        status.missing += tuple(name for name in tree_status.missing if name not in status.missing)
        if not set(status.unused) - LIBRARY_COUNTERS:
            self.forget_values()

    def record_missing(self, key: str) -> None:
        """Note that the file has nothing for a tree, unless that was restored before."""
        status = self.status
        if not any(is_in_tree(name, key) for name in (*status.matched, *status.missing)):
            status.missing += (key,)

    def warn_unattached(self) -> None:
        """Warn once, on the reporting rank, of values that no tree has taken, before a save."""
        if text := self._describe_unattached():
            self._is_reported = True
            if self._is_reporter:
                text += " What is saved now does not have these values."
                warnings.warn(text, stacklevel=4)

    def forget_values(self) -> None:
        """Name nothing any more: another restore has taken the place of this one."""
        self._is_reported = True
        atexit.unregister(self._report_at_exit)

    def _describe_unattached(self) -> str:
        names = [repr(name) for name in self.status.unused if name not in LIBRARY_COUNTERS]
        if not names or self._is_reported or self.status.expects_partial:
            return ""
        return (
            f"{self.path} has {', '.join(shorten(names))}, and nothing was attached by that name "
            "to the Checkpoint that restored it. Attach it after restore, or call expect_partial() "
            "of what restore has returned."
        )

    def _report_at_exit(self) -> None:
        failure = exits().failure or getattr(sys, "last_value", None)
        has_succeeded = failure is None or get_exit_code(failure) == 0
        if self._is_reporter and has_succeeded and (warning_text := self._describe_unattached()):
            say(f"mpistrat: {warning_text}")


_Path = str | os.PathLike[str]


class Checkpoint(tree.NestedTrees):
    """The state of a program under names that do not change, to be saved and restored.

    Below 64 MB a checkpoint is one file, which replica 0 writes; from 64 MB on it is a directory,
    which all ranks write. It can be restored at any number of ranks. Writing is atomic: a
    checkpoint is complete or absent. Every byte has a checksum.

    Each argument becomes an attribute, and attributes that are set later are saved too. Numbers and
    strings live there: ``checkpoint.step += 1`` counts, and restoring assigns what was saved. They
    have to be the same on all ranks, which each save checks.

    Args:
      root: An object or mapping whose own variables are saved too; None for none.
      **kwargs: What is to be saved, and dicts, lists and tuples of it:

        - variables, metrics, and optimizers once they are built; slots are named by the places of
          their variables here. Variables that were made outside of a scope are separate on each
          rank; replica 0's are saved, as for arrays;
        - numbers (int, float, bool, complex, those of NumPy), texts and None; a list or dict of
          only these may grow;
        - generators of NumPy, in the same state on all ranks, as numbers are;
        - arrays of NumPy, of which replica 0's are saved;
        - another `Checkpoint`, with all that it holds;
        - a `Dataset`, or what was distributed of it: the place in it, see
          `CheckpointManager.resume`; a `History`;
        - modules, optimizers and schedulers of PyTorch, tensors and generators; a
          ``mpistrat.jax.TrainState``;
        - objects with the methods ``checkpoint_state()``, which returns any of this, mostly a dict,
          and ``restore_state(state)``, which is given the same with the values of the file. Arrays
          in it are new ones, and their first axis may have changed;
        - other objects of the program's own classes: their attributes that are variables, metrics,
          optimizers, or have these two methods; others are passed over.

    Raises:
      ValueError: A name is that of a method, or begins with an underscore.

    Warns:
      UserWarning: At a save, once for each value: an array, a module or an optimizer of PyTorch, or
        a variable that was made outside of a scope differs between ranks.

    Like: ``tf.train.Checkpoint``.

    Example:
      >>> import tempfile, mpistrat as ms
      >>> v = ms.Variable([1.0, 2.0])
      >>> checkpoint = ms.Checkpoint(model={"w": v})
      >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
      >>> path[-10:]
      'ckpt-1.npz'
      >>> _ = v.assign([0.0, 0.0])
      >>> checkpoint.restore(path).assert_consumed().missing
      ()
      >>> v.numpy()
      array([1., 2.])
    """

    _deferred: DeferredRestore | None = None

    def __init__(self, root: Any = None, **kwargs: Any):
        """Create a checkpoint of these trees; nothing is read yet."""
        self._root = root
        self._counter = 0
        self._home_strategy: Any = None if current_context() is None else current_strategy()
        for name, value in kwargs.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"Checkpoint({name}=...): this name is reserved; use another one.")
            setattr(self, name, value)

    if TYPE_CHECKING:  # attributes are what the program makes of them

        def __getattr__(self, name: str) -> Any:
            """Return what was given by that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Add a tree under a name; it takes the values that an empty checkpoint has restored.

        Collective if there are values for it, see `restore`; else it never communicates.
        """
        deferred = self._deferred
        if deferred is None or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        previous_attributes = dict(vars(self))
        object.__setattr__(self, name, value)
        try:
            self._restore_tree(name, deferred)
        except BaseException:
            vars(self).pop(name)
            vars(self).update(previous_attributes)
            raise

    def _restore_tree(self, name: str, deferred: DeferredRestore) -> None:
        """Give the tree `name` the values that wait for it. Collective if there are any."""
        key = tree.quote_key(name)
        if not deferred.has_values_for(key):
            deferred.record_missing(key)
            return
        self._deferred = None  # values that are put in their places attach nothing
        try:
            call = f"Checkpoint.{name} = ..., after restore"
            status, _ = self._restore_trees(
                call, deferred.path, is_partial=True, has_counter=False, deferred=deferred, key=key
            )
        finally:
            self._deferred = deferred
        deferred.record_tree_status(status)

    def variables(self) -> dict[str, Variable]:
        """Return all variables, by their names in files. Never communicates.

        Arrays that are not variables are among them, with the attributes that saving asks for.

        Raises:
          StructureError: A tree holds nothing to save, or what cannot be saved, or two with one
            name.
        """
        program_state = self._collect_state()
        if program_state.failure is not None:
            raise program_state.failure
        return {
            name: cast("Variable", entry)
            for name, entry in program_state.entries.items()
            if name != VALUES_NAME
        }

    def _collect_state(self) -> tree.ProgramState:
        """Return all that is to be saved."""
        return tree.collect_program_state(
            self._root, self._trees(), functools.partial(setattr, self)
        )

    @property
    def strategy(self) -> Any:
        """The strategy that the variables belong to; the current one if there are none yet.

        Those of the default strategy, or of a `OneDeviceStrategy`, belong to that of the others; if
        there are no others, to the one in whose scope this is, or the checkpoint was created.

        Raises:
          StrategyError: They belong to several.
          StructureError: As of `variables`.
        """
        strategy, failure, _ = _resolve_owner(self)
        if failure is not None:
            raise failure
        return strategy

    @property
    def save_counter(self) -> int:
        """How many times it was saved, including saves before the last restore."""
        return self._counter

    def save(self, file_prefix: _Path) -> str:
        """Save the values under the next number.

        Collective: all ranks call it, in cross-replica code.

        Args:
          file_prefix: Directory and name, such as ``"run/ckpt"``; the same string on every rank.
            Replica 0 makes the directory; below 64 MB only that rank needs to see it.

        Returns:
          The path, ``run/ckpt-N.npz``, or ``run/ckpt-N.arrays`` of a directory. N is one more than
          `save_counter`, or than the highest number that is there.

        Raises:
          OSError: It cannot be written, or a node does not see the directory of a large one; on
            every rank. Existing checkpoints are unchanged.
          FileExistsError: Another job saves under this name: the directory has a newer checkpoint
            than this program has saved, or has found when it restored one or made a
            `CheckpointManager`. Nothing is written.
          ContextError: Called in replica code.
          StructureError: A tree holds nothing to save, or what cannot be saved.
          StrategyError: The variables belong to several strategies.
          ValueError: `file_prefix` names no file.
          TypeError: It is not a string or path.
          LockstepError: The ranks save different variables, numbers or strings, or elsewhere.

        Cost: three handshakes; one rank writes, and waits for the disk. From 64 MB on two more, and
        all ranks write their share. ON_READ variables are reduced first. Slots of an optimizer with
        ``shard="all"`` are gathered, one after the other; of a file replica 0 keeps them until they
        are written.
        """
        return self._save_numbered(file_prefix)[0]

    def _save_numbered(
        self,
        file_prefix: _Path,
        number: int | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
        retention: atomic.Retention | None = None,
        background_saver: BackgroundSaver | None = None,
    ) -> tuple[str, list[str]]:
        """Return the new path, and the paths of all; see `saving.save_checkpoint`."""
        with _entering_strategy(self, "Checkpoint.save", is_save=True) as (lockstep, state):
            with lockstep.validating_collectively("Checkpoint.save"):
                if self._deferred is not None:
                    self._deferred.warn_unattached()
                prefix = files.check_path("Checkpoint.save", "file_prefix", file_prefix)
                # pathlib drops the end of "run/", and takes the directory as a name.
                ends_with_separator = os.fspath(file_prefix).endswith(os.sep)
                if prefix.name in ("", "..") or prefix.name.startswith(".") or ends_with_separator:
                    raise ValueError(
                        f"Checkpoint.save({os.fspath(file_prefix)!r}): expected a directory and a "
                        "name, such as 'run/ckpt'."
                    )
            self._counter, path, paths = saving.save_checkpoint(
                lockstep,
                state.entries,
                prefix,
                self._counter,
                requested_number=number,
                metrics=metrics,
                retention=retention,
                background_saver=background_saver,
            )
        return os.fspath(path), paths

    def write(self, file_prefix: _Path) -> str:
        """Save the values as ``file_prefix.npz``, replacing it; `save_counter` stays as it is.

        Collective; everything else is as in `save`.

        Args:
          file_prefix: The path without its ending.

        Returns:
          The path.
        """
        with _entering_strategy(self, "Checkpoint.write", is_save=True) as (lockstep, state):
            with lockstep.validating_collectively("Checkpoint.write"):
                if self._deferred is not None:
                    self._deferred.warn_unattached()
                path = _make_checkpoint_path("Checkpoint.write", file_prefix, "file_prefix")
            path = saving.overwrite_checkpoint(lockstep, state.entries, path, self._counter)
        return os.fspath(path)

    def restore(self, save_path: _Path | None, partial: bool = False) -> Restored:
        """Restore everything from a file, or nothing at all.

        Collective: all ranks call it, in cross-replica code.

        An empty checkpoint, which nothing is attached to yet, restores what is attached later: to
        set an attribute then is collective, reads the file again, and gives the values at once, or
        raises as `restore` does and attaches nothing. The next save, or the end of the program,
        names what of the file nothing was attached for, unless ``expect_partial()`` was called.

        Reading a variable afterwards gives the saved value. For an ON_READ variable with SUM each
        of n replicas gets a part, so that the parts add up to it: of integers the quotient, and one
        more on so many of the first replicas as remain; else an n-th, where adding that up n times
        gives the very bits that were saved, and where it does not, replica 0 gets everything, and
        the others 0.

        Args:
          save_path: The result of `save`, with or without its ending; only replica 0 needs to see a
            file, all nodes a directory. None, as `latest_checkpoint` gives where there is none,
            restores nothing.
          partial: Variables that are not in the file stay as they are, and what only the file has
            is left there; else both are errors. dtypes and shapes have to be equal anyway. State of
            an optimizer that is not in the file begins afresh, as of a new optimizer of the
            restored weights, and options that differ are a warning.

        Returns:
          The names that were missing, and those that were left over, if that was allowed.

        Raises:
          OSError: The file cannot be read; on every rank, as all of these.
          CheckpointError: It is damaged, or not a checkpoint.
          DataError: It is of another format.
          StructureError: It has other variables, or with other shapes or dtypes: says which.
          ValueError: `save_path` names no file.
          TypeError: It is not a string or path.
          ContextError: Called in replica code, or in the function of ``extended.update``.
          LockstepError: The ranks restore different variables, or from elsewhere.

        After Ctrl-C during a restore, some variables may have new values; restore again.

        Cost: replica 0 reads the whole file into its memory; then a handshake and an ``MPI_Bcast``,
        for which every rank has memory as large as the file, and an all-reduce of each ON_READ sum
        of floating point. The ranks of a node read a directory together, each a part;
        there are no broadcasts.
        """
        return self._restore_trees("Checkpoint.restore", save_path, is_partial=partial)[0]

    def read(self, save_path: _Path | None, partial: bool = False) -> Restored:
        """Do as `restore`, but leave `save_counter` as it is. Collective.

        Args:
          save_path: The result of `write`, with or without ``.npz``.
          partial: As in `restore`.

        Returns:
          As `restore`.
        """
        return self._restore_trees(
            "Checkpoint.read", save_path, is_partial=partial, has_counter=False
        )[0]

    def _restore_trees(
        self,
        call: str,
        save_path: _Path | None,
        *,
        is_partial: bool,
        required_number: int | None = None,
        has_counter: bool = True,
        deferred: DeferredRestore | None = None,
        key: str = "",
    ) -> tuple[Restored, int]:
        """Return what was done, and how many times the checkpoint had been saved.

        Args:
          call: The call.
          save_path: The path.
          is_partial: As of `restore`.
          required_number: As of `restoring.restore_variables`.
          has_counter: Whether `save_counter` is restored.
          deferred: Restore only what is deferred, of the tree `key`; None for all trees.
          key: The tree.
        """
        is_empty = deferred is None and self._root is None and not self._trees()
        with _entering_strategy(self, call, is_empty=is_empty) as (lockstep, program_state):
            entries, optimizers, stateful, _ = program_state
            if deferred is not None:
                entries, stateful = deferred.select_waiting(key, entries, stateful)
            with lockstep.validating_collectively(call):
                if deferred is not None:
                    deferred.check_attach_order(key, optimizers)
                path = None if save_path is None else _make_checkpoint_path(call, save_path)
                is_partial = check_bool(f"{call}(partial)", is_partial) or is_empty
            if path is None:
                lockstep.handshake(f"{call}(None)")
                return Restored(None), 0
            status, counter = restoring.restore_variables(
                lockstep, entries, path, optimizers, is_partial, required_number=required_number
            )
            if status.path is None:
                return status, counter
            reset_missing_state(optimizers, status.missing)
            changes = describe_option_changes(optimizers, status.missing, status.unused)
            warn_of_option_changes(lockstep, call, status.path, changes)
            _restore_objects(lockstep, call, stateful, status.missing)
            if deferred is None:
                if self._deferred is not None:
                    self._deferred.forget_values()
                self._deferred = DeferredRestore(status, lockstep) if is_empty else None
        if has_counter:
            self._counter = counter
        return status, counter

    def __repr__(self) -> str:
        """Return the names of the trees."""
        return f"Checkpoint({', '.join(self._trees())})"


def _restore_objects(
    lockstep: Lockstep,
    call: str,
    stateful: Mapping[str, tuple[object, Callable[[], None]]],
    missing_names: Sequence[str],
) -> None:
    """Call ``restore_state`` of the objects that the file has values for. Collective."""
    if not stateful:
        return
    with lockstep.validating_collectively(call):
        for prefix, (_, restore_object) in stateful.items():
            if not any(is_in_tree(name, prefix) for name in missing_names):
                restore_object()
    lockstep.handshake(f"{call}, and restore_state of {', '.join(stateful)}")


def _make_checkpoint_path(call: str, value: _Path, argument: str = "save_path") -> Path:
    path = files.check_path(call, argument, value)
    if path.name in ("", ".."):
        raise ValueError(
            f"{call}({os.fspath(value)!r}): {argument} names no file; expected a directory and a "
            "name, such as 'run/ckpt-1'."
        )
    has_suffix = path.name.endswith((files.FILE_SUFFIX, files.DIRECTORY_SUFFIX))
    return path if has_suffix else path.with_name(path.name + files.FILE_SUFFIX)


def determine_owner(checkpoint: Checkpoint) -> tuple[Any, Exception | None]:
    """Return the strategy of who saves it from now on, and what is wrong with the trees."""
    strategy, failure, _ = _resolve_owner(checkpoint)
    if current_context() is not None:
        checkpoint._home_strategy = checkpoint._home_strategy or strategy
    return strategy, failure


def _resolve_owner(checkpoint: Checkpoint) -> tuple[Any, Exception | None, tree.ProgramState]:
    """Return what `determine_owner` does, and what is to be saved."""
    program_state, failure = checkpoint._collect_state(), None
    owners: dict[int, tuple[str, Any]] = {}
    for name, variable in program_state.entries.items():
        # A cell without a strategy belongs to that of the variables.
        if variable.strategy is not None:
            owners.setdefault(id(variable.strategy), (name, variable.strategy))
    shared_strategies = {
        name: strategy
        for name, strategy in owners.values()
        if strategy._replicas.view is not SINGLE_REPLICA
    }
    if len(shared_strategies) > 1:
        text = "; ".join(
            f"{name!r} to {strategy!r}" for name, strategy in shared_strategies.items()
        )
        failure = StrategyError(
            f"the variables of a checkpoint belong to several strategies: {text}. Create all of "
            "them in one `with strategy.scope()`."
        )
    if shared_strategies:
        strategy = next(iter(shared_strategies.values()))
    elif current_context() is not None or not (owners or checkpoint._home_strategy):
        strategy = current_strategy()
    elif checkpoint._home_strategy is not None:
        strategy = checkpoint._home_strategy
    else:
        strategy = min(
            (candidate for _, candidate in owners.values()),
            key=lambda candidate: candidate._is_default,
        )
    for name, variable in program_state.entries.items():
        if isinstance(variable, Variable) and variable.strategy not in (
            strategy,
            *shared_strategies.values(),
        ):
            program_state.entries[name] = make_cell(name, variable)
    first_failure = failure if program_state.failure is None else program_state.failure
    return strategy, first_failure, program_state


def check_all_ranks_save(strategy: Any, call: str) -> None:
    """Raise StrategyError if each rank of a job would take itself for replica 0."""
    if strategy._replicas.view is SINGLE_REPLICA and known_job_size() > 1:
        raise StrategyError(
            f"{call}: what is saved belongs to {strategy!r}, which has only one of the "
            f"{known_job_size()} ranks, so every rank would write to the same file. Create it, "
            "or make this call, in the scope of a strategy of all ranks: `with "
            "mpistrat.MirroredStrategy().scope():`. Values such as arrays belong to the "
            "strategy in whose scope the Checkpoint is created."
        )


@contextlib.contextmanager
def _entering_strategy(
    checkpoint: Checkpoint, call: str, is_save: bool = False, is_empty: bool = False
) -> Iterator[tuple[Lockstep, tree.ProgramState]]:
    """Run the body in cross-replica code of the checkpoint's strategy, with the program's state."""
    strategy, failure, program_state = _resolve_owner(checkpoint)
    with enter_cross_replica(strategy, call, "it after run()"):
        with strategy._replicas.lockstep.validating_collectively(call):
            if failure is not None:
                raise failure
            if not program_state.entries and not is_empty:
                raise StructureError(f"{call}: the checkpoint holds no variables.")
            if is_save:
                check_all_ranks_save(strategy, call)
            context = current_context()
            if context is not None and context.updated_variable is not None:
                raise ContextError(f"{call} was called in the function of update; call it later.")
        yield strategy._replicas.lockstep, program_state
