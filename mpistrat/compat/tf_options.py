"""Options of datasets with all that ``tf.data`` has of them; most of it changes nothing here."""

from __future__ import annotations

from typing import Any

from mpistrat.data.pipeline import DatasetOptions

__all__ = ["AutotuneOptions", "OptimizationOptions", "Options", "ThreadingOptions"]


class _FixedAttributes:
    """Attributes that are there, and no others.

    Attributes:
      path: What messages call it.
      inert_names: The attributes that change nothing; each is None at first.
    """

    path = ""
    inert_names = ""

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        vars(self).update(dict.fromkeys(self.inert_names.split()))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that there is."""
        if name not in vars(self) and not hasattr(type(self), name):
            raise self._make_error(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says which attributes there are."""
        raise AttributeError(name) if name.startswith("__") else self._make_error(name)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` are options of the same kind, with all attributes alike."""
        is_equal = type(self) is type(other) and vars(self) == vars(other)
        return is_equal and (
            not isinstance(self, DatasetOptions) or DatasetOptions.__eq__(self, other)
        )

    def _make_error(self, name: str) -> AttributeError:
        option_names = [*DatasetOptions.__slots__] if isinstance(self, DatasetOptions) else []
        return AttributeError(
            f"{self.path} has no {name}. It has {', '.join([*option_names, *vars(self)])}."
        )


class AutotuneOptions(_FixedAttributes):
    """Like: ``tf.data.experimental.AutotuneOptions``; it changes nothing."""

    path = "tf.data.Options.autotune"
    inert_names = (
        "enabled autotune_algorithm cpu_budget initial_parallelism min_parallelism ram_budget"
    )


class OptimizationOptions(_FixedAttributes):
    """Like: ``tf.data.experimental.OptimizationOptions``; it changes nothing."""

    path = "tf.data.Options.experimental_optimization"
    inert_names = (
        "apply_default_optimizations filter_fusion filter_parallelization inject_prefetch "
        "map_and_batch_fusion map_and_filter_fusion map_fusion map_parallelization "
        "noop_elimination parallel_batch seq_interleave_prefetch shuffle_and_repeat_fusion"
    )


class ThreadingOptions(_FixedAttributes):
    """Like: ``tf.data.ThreadingOptions``; it changes nothing."""

    path = "tf.data.Options.threading"
    inert_names = "max_intra_op_parallelism private_threadpool_size"


class Options(_FixedAttributes, DatasetOptions):
    """`mpistrat.DatasetOptions` with what else ``tf.data.Options`` has, which changes nothing.

    Elements come in one order always; `Dataset.prefetch` alone says what is read ahead.

    Like: ``tf.data.Options``.

    Example:
      >>> options = Options()
      >>> options.threading.private_threadpool_size = 8
      >>> options.deterministic = False
    """

    path = "tf.data.Options"
    inert_names = (
        "dataset_name deterministic experimental_deterministic experimental_external_state_policy "
        "experimental_slack experimental_symbolic_checkpoint experimental_warm_start"
    )

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        super().__init__()
        DatasetOptions.__init__(self)
        threading = ThreadingOptions()
        vars(self).update(
            autotune=AutotuneOptions(),
            experimental_optimization=OptimizationOptions(),
            experimental_threading=threading,
            threading=threading,
        )
