"""`Checkpoint`: the state of a program, saved and restored by all ranks together.

Values that an empty checkpoint has restored, and that wait for what is attached later.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from mpistrat.arrays import check_bool
from mpistrat.checkpoint import atomic, files, restoring, saving, tree
from mpistrat.checkpoint.background import Background
from mpistrat.checkpoint.restoring import COUNTERS, Restored
from mpistrat.checkpoint.tree import SavedOptimizer, begin_afresh
from mpistrat.checkpoint.values import NAME, Values, cell_of
from mpistrat.comm import mpi
from mpistrat.comm.callsite import shorten
from mpistrat.comm.session import known_job_size
from mpistrat.config import rank_text
from mpistrat.errors import ContextError, StrategyError, StructureError
from mpistrat.lockstep.ending import code_of
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.context_stack import cross_replica, current
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables.kinds import ALONE
from mpistrat.variables.variable import Variable
from mpistrat.watchdog.status_board import say


def is_below(name: str, key: str) -> bool:
    """Tell whether a name of a file is that of the tree `key`, or of something in it.

    Example:
      >>> is_below("model/w", "model"), is_below("model", "model"), is_below("models/w", "model")
      (True, True, False)
    """
    return f"{name}/".startswith(f"{key}/")


@final
class Deferred:
    """What is left to restore of a file.

    Attributes:
      path: The file.
      status: What `Checkpoint.restore` has returned; what is attached changes it.
    """

    def __init__(self, status: Restored, lockstep: Lockstep):
        """Wait for what is attached, and name at the end of the program what never was.

        Args:
          status: As the attribute.
          lockstep: The ranks; the first of them names it.
        """
        self.path, self.status = Path(status.path or ""), status
        comm = lockstep.session.comm
        # A strategy of one rank alone, outside of all scopes, is there on every rank of a job.
        is_first = comm.name == mpi.MPIComm.name or rank_text() in ("", "0")
        self._speaks, self._is_named = comm.rank == 0 and is_first, False
        atexit.register(self._end)

    def has_values_for(self, key: str) -> bool:
        """Tell whether the file has something for the tree `key` that nothing has taken yet."""
        return any(is_below(name, key) for name in self.status.unused)

    def select_waiting(
        self, key: str, entries: Mapping[str, Any], stateful: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what of the tree `key` was not restored yet.

        Args:
          key: The tree.
          entries: All entries of the checkpoint.
          stateful: Its objects with ``restore_state``.
        """

        def waits(name: str) -> bool:
            return is_below(name, key) and name not in self.status.matched

        waiting_entries = {name: entry for name, entry in entries.items() if waits(name)}
        values = entries[NAME].values.values if NAME in entries else {}
        values = {name: value for name, value in values.items() if waits(name)}
        if values:
            waiting_entries[NAME] = Values(values).cell()
        names = [*waiting_entries, *values]
        waiting_stateful = {
            begin: stateful_pair
            for begin, stateful_pair in stateful.items()
            if any(is_below(name, begin) for name in names)
        }
        return waiting_entries, waiting_stateful

    def check_order(self, key: str, optimizers: Sequence[SavedOptimizer]) -> None:
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
                is_below(optimizer.path, key)
                and waiting
                and not known_names.issuperset(optimizer.slots)
            ):
                raise StructureError(
                    f"{optimizer.text} was attached as {optimizer.path!r} before its variables, "
                    f"and {self.path} has its slots by their places: "
                    f"{', '.join(shorten(waiting))}. "
                    "Attach the variables first, by the names that they were saved under."
                )

    def note(self, tree_status: Restored) -> None:
        """Note what a tree has taken, and what of it the file does not have."""
        status = self.status
        status.unused = tuple(name for name in status.unused if name not in tree_status.matched)
        status.matched += tree_status.matched
        status.missing += tuple(name for name in tree_status.missing if name not in status.missing)
        if not set(status.unused) - COUNTERS:
            self.close()

    def note_missing(self, key: str) -> None:
        """Note that the file has nothing for a tree, unless that was restored before."""
        status = self.status
        if not any(is_below(name, key) for name in (*status.matched, *status.missing)):
            status.missing += (key,)

    def warn(self) -> None:
        """Warn once, on the rank that speaks, of what was never attached; then it is saved."""
        if text := self._text():
            self._is_named = True
            if self._speaks:
                text += " What is saved now does not have these values."
                warnings.warn(text, stacklevel=4)

    def close(self) -> None:
        """Name nothing any more: another restore has taken the place of this one."""
        self._is_named = True
        atexit.unregister(self._end)

    def _text(self) -> str:
        names = [repr(name) for name in self.status.unused if name not in COUNTERS]
        if not names or self._is_named or self.status.expects_partial:
            return ""
        return (
            f"{self.path} has {', '.join(shorten(names))}, and nothing was attached by that name "
            "to the Checkpoint that restored it. Attach it after restore, or call expect_partial() "
            "of what restore has returned."
        )

    def _end(self) -> None:
        failure = exits().failure or getattr(sys, "last_value", None)
        is_well = failure is None or code_of(failure) == 0
        if self._speaks and is_well and (text := self._text()):
            say(f"mpistrat: {text}")


_Path = str | os.PathLike[str]


class Checkpoint(tree.Nested):
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
          their variables here. Of variables that were made outside of a scope, which each rank has
          of its own, replica 0's are saved, as of arrays;
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

    _deferred: Deferred | None = None

    def __init__(self, root: Any = None, **kwargs: Any):
        """Create a checkpoint of these trees; nothing is read yet."""
        self._root = root
        self._counter = 0
        self._home_strategy: Any = None if current() is None else current_strategy()
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

    def _restore_tree(self, name: str, deferred: Deferred) -> None:
        """Give the tree `name` the values that wait for it. Collective if there are any."""
        key = tree.part(name)
        if not deferred.has_values_for(key):
            deferred.note_missing(key)
            return
        self._deferred = None  # values that are put in their places attach nothing
        try:
            call = f"Checkpoint.{name} = ..., after restore"
            status, _ = self._restored(
                call, deferred.path, True, counts=False, part=(deferred, key)
            )
        finally:
            self._deferred = deferred
        deferred.note(status)

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
            if name != NAME
        }

    def _collect_state(self) -> tree.ProgramState:
        """Return all that is to be saved."""
        return tree.entries(self._root, self._trees(), functools.partial(setattr, self))

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
        return self._saved(file_prefix)[0]

    def _saved(
        self,
        file_prefix: _Path,
        number: int | None = None,
        keep: atomic.Retention | None = None,
        background: Background | None = None,
    ) -> tuple[str, list[str]]:
        """Return the path, and all that are there; the arguments are those of `saving.save`."""
        with _in_strategy(self, "Checkpoint.save", saves=True) as (lockstep, entries, _):
            with lockstep.preparing("Checkpoint.save"):
                if self._deferred is not None:
                    self._deferred.warn()
                prefix = files.checked_path("Checkpoint.save", "file_prefix", file_prefix)
                # pathlib drops the end of "run/", and takes the directory as a name.
                ends_with_separator = os.fspath(file_prefix).endswith(os.sep)
                if prefix.name in ("", "..") or prefix.name.startswith(".") or ends_with_separator:
                    raise ValueError(
                        f"Checkpoint.save({os.fspath(file_prefix)!r}): expected a directory and a "
                        "name, such as 'run/ckpt'."
                    )
            self._counter, path, paths = saving.save(
                lockstep, entries, prefix, self._counter, number, keep, background
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
        with _in_strategy(self, "Checkpoint.write", saves=True) as (lockstep, entries, _):
            with lockstep.preparing("Checkpoint.write"):
                if self._deferred is not None:
                    self._deferred.warn()
                path = _file("Checkpoint.write", "file_prefix", file_prefix)
            path = saving.overwrite(lockstep, entries, path, self._counter)
        return os.fspath(path)

    def restore(self, save_path: _Path | None, partial: bool = False) -> Restored:
        """Restore everything from a file, or nothing at all.

        Collective: all ranks call it, in cross-replica code.

        An empty checkpoint, which nothing is attached to yet, restores what is attached later: to
        set an attribute then is collective, reads the file again, and gives the values at once, or
        raises as `restore` does and attaches nothing. The next save, or the end of the program,
        names what of the file nothing was attached for, unless ``expect_partial()`` was called.

        What was saved is what reads afterwards. For an ON_READ variable with SUM each of n replicas
        gets a part that makes it so: of integers the quotient, and one more on so many of the first
        replicas as remain; else an n-th, where adding that up n times gives the very bits that were
        saved, and where it does not, replica 0 gets everything, and the others 0.

        Args:
          save_path: What `save` returned, with or without its ending; only replica 0 needs to see a
            file, all nodes a directory. None, as `latest_checkpoint` gives where there is none,
            restores nothing.
          partial: Variables that are not in the file stay as they are, and what only the file has
            is left there; else both are errors. dtypes and shapes have to be equal anyway. State of
            an optimizer that is not in the file begins afresh, as of a new optimizer of the
            restored weights, and options that differ are a warning.

        Returns:
          What was missing and what was left over, if that was allowed.

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
        for which every rank has memory as large as the file, and an all-reduce of what is an
        ON_READ sum of floating point. The ranks of a node read a directory together, each a part;
        there are no broadcasts.
        """
        return self._restored("Checkpoint.restore", save_path, partial)[0]

    def read(self, save_path: _Path | None, partial: bool = False) -> Restored:
        """Do as `restore`, but leave `save_counter` as it is. Collective.

        Args:
          save_path: What `write` returned, with or without ``.npz``.
          partial: As in `restore`.

        Returns:
          As `restore`.
        """
        return self._restored("Checkpoint.read", save_path, partial, counts=False)[0]

    def _restored(
        self,
        name: str,
        save_path: _Path | None,
        partial: bool,
        number: int | None = None,
        counts: bool = True,
        part: tuple[Deferred, str] | None = None,
    ) -> tuple[Restored, int]:
        """Return what was done, and how many times the checkpoint had been saved.

        Args:
          name: The call.
          save_path: The path.
          partial: As of `restore`.
          number: As of `restoring.restore`.
          counts: Whether `save_counter` is restored.
          part: Restore only what is deferred and in this tree; None for all trees.
        """
        empty = part is None and self._root is None and not self._trees()
        with _in_strategy(self, name, empty=empty) as (lockstep, entries, program_state):
            optimizers, stateful = program_state.optimizers, program_state.stateful
            if part is not None:
                entries, stateful = part[0].select_waiting(part[1], entries, stateful)
            with lockstep.preparing(name):
                if part is not None:
                    part[0].check_order(part[1], optimizers)
                path = None if save_path is None else _file(name, "save_path", save_path)
                partial = check_bool(f"{name}(partial)", partial)
            if path is None:
                lockstep.handshake(f"{name}(None)")
                return Restored(None), 0
            status, counter = restoring.restore(
                lockstep, entries, path, partial or empty, number, optimizers
            )
            if status.path is not None:
                begin_afresh(lockstep, name, status.path, optimizers, status.missing, status.unused)
            if stateful and status.path is not None:
                with lockstep.preparing(name):
                    for begin, (_, give) in stateful.items():
                        if not any(f"{key}/".startswith(f"{begin}/") for key in status.missing):
                            give()
                lockstep.handshake(f"{name}, and restore_state of {', '.join(stateful)}")
            if part is None and status.path is not None:
                if self._deferred is not None:
                    self._deferred.close()
                self._deferred = Deferred(status, lockstep) if empty else None
        if counts and status.path is not None:
            self._counter = counter
        return status, counter

    def __repr__(self) -> str:
        """Return the names of the trees."""
        return f"Checkpoint({', '.join(self._trees())})"


def _file(call: str, argument: str, value: Any) -> Path:
    path = files.checked_path(call, argument, value)
    if path.name in ("", ".."):
        raise ValueError(
            f"{call}({os.fspath(value)!r}): {argument} names no file; expected a directory and a "
            "name, such as 'run/ckpt-1'."
        )
    has_suffix = path.name.endswith((files.SUFFIX, files.FOLDER))
    return path if has_suffix else path.with_name(path.name + files.SUFFIX)


def owner_of(checkpoint: Checkpoint) -> tuple[Any, Exception | None]:
    """Return the strategy of who saves it from now on, and what is wrong with the trees."""
    strategy, failure, _ = _resolve_owner(checkpoint)
    if current() is not None:
        checkpoint._home_strategy = checkpoint._home_strategy or strategy
    return strategy, failure


def _resolve_owner(checkpoint: Checkpoint) -> tuple[Any, Exception | None, tree.ProgramState]:
    """Return what `owner_of` does, and what is to be saved."""
    program_state, failure = checkpoint._collect_state(), None
    owners: dict[int, tuple[str, Any]] = {}
    for name, variable in program_state.entries.items():
        # A cell without a strategy belongs to that of the variables.
        if variable.strategy is not None:
            owners.setdefault(id(variable.strategy), (name, variable.strategy))
    shared_strategies = {
        name: strategy for name, strategy in owners.values() if strategy.replicas.view is not ALONE
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
    elif current() is not None or not (owners or checkpoint._home_strategy):
        strategy = current_strategy()
    elif checkpoint._home_strategy is not None:
        strategy = checkpoint._home_strategy
    else:
        strategy = min(
            (candidate for _, candidate in owners.values()),
            key=lambda candidate: candidate.is_default,
        )
    for name, variable in program_state.entries.items():
        if isinstance(variable, Variable) and variable.strategy not in (
            strategy,
            *shared_strategies.values(),
        ):
            program_state.entries[name] = cell_of(name, variable)
    first_failure = failure if program_state.failure is None else program_state.failure
    return strategy, first_failure, program_state


def refuse_alone(strategy: Any, name: str) -> None:
    """Raise StrategyError if each rank of a job would take itself for replica 0."""
    if strategy.replicas.view is ALONE and known_job_size() > 1:
        raise StrategyError(
            f"{name}: what is saved belongs to {strategy!r}, which has only one of the "
            f"{known_job_size()} ranks, so every rank would write to the same file. Create it, "
            "or make this call, in the scope of a strategy of all ranks: `with "
            "mpistrat.MirroredStrategy().scope():`. Values such as arrays belong to the "
            "strategy in whose scope the Checkpoint is created."
        )


@contextlib.contextmanager
def _in_strategy(
    checkpoint: Checkpoint, name: str, saves: bool = False, empty: bool = False
) -> Iterator[tuple[Lockstep, dict[str, Any], tree.ProgramState]]:
    """Run the body in cross-replica code of the checkpoint's strategy, with what it saves."""
    strategy, failure, program_state = _resolve_owner(checkpoint)
    with cross_replica(strategy, name, "it after run()"):
        with strategy.replicas.lockstep.preparing(name):
            if failure is not None:
                raise failure
            if not program_state.entries and not empty:
                raise StructureError(f"{name}: the checkpoint holds no variables.")
            if saves:
                refuse_alone(strategy, name)
            mode = current()
            if mode is not None and mode.updating is not None:
                raise ContextError(f"{name} was called in the function of update; call it later.")
        yield strategy.replicas.lockstep, program_state.entries, program_state
