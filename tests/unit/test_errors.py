"""Exceptions: each is the built-in it refines, and a remote one is the built-in raised there."""

from __future__ import annotations

import builtins
import copy
import pickle

import pytest
from every import every

from mpistrat import errors


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("ContextError", (RuntimeError,)),
        ("StrategyError", (RuntimeError,)),
        ("LockstepError", (RuntimeError, ValueError)),
        ("RemoteError", (RuntimeError,)),
        ("StructureError", (ValueError,)),
        ("AxisError", (ValueError,)),
        ("DataError", (ValueError,)),
        ("LeafTypeError", (TypeError,)),
        ("OptionError", (ValueError,)),
        ("RefusedError", (NotImplementedError,)),
        ("LaunchError", (RuntimeError,)),
    ],
)
def test_each_is_the_builtin_it_refines(name, bases):
    cls = getattr(errors, name)
    assert issubclass(cls, errors.MpistratError)
    for base in bases:
        assert issubclass(cls, base)
    assert name in errors.__doc__


BUILTINS = sorted(
    name
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, Exception) and name == cls.__name__
)


@every("name", BUILTINS)
def test_every_builtin_exception_can_be_remote(name):
    cls = getattr(builtins, name)
    names = tuple(c.__name__ for c in cls.__mro__ if c.__module__ == "builtins")
    error = errors.remote_error("rank 1 failed", 1, name, names, "trace")
    assert isinstance(error, errors.RemoteError)
    if "Group" not in name:  # a group wants to hold exceptions, and those are on the other rank
        assert isinstance(error, cls)
    assert str(error) == "rank 1 failed"
    assert (error.rank, error.kind, error.remote_traceback) == (1, name, "trace")
    with pytest.raises(errors.RemoteError):
        raise error


@pytest.mark.parametrize("names", [(), ("KeyboardInterrupt", "BaseException", "object"), ("int",)])
def test_what_is_no_exception_class_gives_the_plain_remote_error(names):
    error = errors.remote_error("m", 0, "X", names, "")
    assert type(error) is errors.RemoteError


def test_the_most_derived_builtin_counts():
    error = errors.remote_error("m", 0, "X", ("KeyError", "LookupError", "Exception"), "")
    assert isinstance(error, KeyError)


@every("name", [*BUILTINS, "StructureError", "LeafTypeError", "NoSuchError"])
@every("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_remote_error_can_be_sent_to_another_process(name, again):
    error = errors.remote_error("rank 1 failed", 1, name, (name, "Exception"), "trace")
    error.__notes__ = ["seen in step 3"]
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == "rank 1 failed"
    assert (other.rank, other.kind, other.remote_traceback) == (1, name, "trace")
    assert other.__notes__ == ["seen in step 3"]
