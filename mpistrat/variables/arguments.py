"""Checks of arguments, whose errors name the argument."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat.errors import StructureError


def check_function(call: str, name: str, fn: object) -> None:
    """Raise if `fn` cannot be called.

    Raises:
      TypeError: It cannot.
    """
    if not callable(fn):
        raise TypeError(f"{call}: {name} must be a function, got {fn!r:.80}.")


def check_class(
    name: str,
    value: object,
    expected_class: type,
    error_class: type[Exception] = TypeError,
    class_label: str = "",
) -> None:
    """Raise unless an argument is of a class, or None.

    Args:
      name: The name of the argument.
      value: The argument.
      expected_class: The class.
      error_class: The class of the error.
      class_label: The name of the class in programs; its own if empty.
    """
    if value is not None and not isinstance(value, expected_class):
        requirement = f"must be an instance of {class_label or expected_class.__name__}, or None"
        raise error_class(f"{name} {requirement}, got {value!r:.80} ({type(value).__name__}).")


def check_long_operation(name: object, max_seconds: object) -> None:
    """Raise if a long operation has no name, or no number of seconds.

    Raises:
      TypeError: One of them is of another kind.
    """
    if not isinstance(name, str):
        raise TypeError(f"long_operation: name must be a string, got {name!r:.60}.")
    if not isinstance(max_seconds, numbers.Real):
        raise TypeError(
            f"long_operation({name!r}): max_seconds must be a number of seconds, got "
            f"{max_seconds!r:.60} ({type(max_seconds).__name__})."
        )


def explain_arguments(
    call: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: BaseException,
) -> None:
    """Add to the text of an error that `args` has a tuple for several arguments, or the reverse.

    Args:
      call: The call, for messages.
      fn: The function that could not be called.
      args: Its arguments by place.
      kwargs: Its arguments by name.
      error: The error of calling it.
    """
    if not isinstance(error, TypeError) or error.args[1:]:
        return
    if len(args) == 1 and isinstance(args[0], list | tuple):
        other_arguments: Sequence[Any] = args[0]
        class_name, count = type(other_arguments).__name__, len(other_arguments)
        text = f"args=(batch,) is one argument, a {class_name} of {count}. Write "
        text += "args=batch if its items are the arguments."
    else:
        other_arguments = (tuple(args),)
        text = f"args has {len(args)} arguments. Write args=(batch,) if the tuple is one argument."
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        signature = inspect.signature(fn)
        with contextlib.suppress(TypeError):
            signature.bind(*args, **kwargs)
            return  # the function itself has raised it
        signature.bind(*other_arguments, **kwargs)
        error.args = (f"{error.args[0]}\n  {call}: {text}",)


def normalize_arguments(
    call: str, args: object, kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function by place and by name.

    Args:
      call: The call, for messages.
      args: A list or tuple.
      kwargs: A dict with texts for keys, or None.

    Raises:
      StructureError: `args` is not a list or tuple.
      TypeError: `kwargs` is not a dict with texts for keys.

    Example:
      >>> normalize_arguments("run", [1], None)
      ((1,), {})
    """
    if type(args) is not tuple and not isinstance(args, list | tuple):
        raise StructureError(
            f"{call}: args must be a list or tuple of arguments, got {type(args).__name__}. "
            "For one argument write args=(value,)."
        )
    if kwargs is None:
        return tuple(args), {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(
            f"{call}: kwargs must be a dict of arguments by name, or None, got {kwargs!r:.80}. "
            "Give positional arguments together, as args=(x, y)."
        )
    return tuple(args), dict(kwargs)
