"""Which error of ours stands for which recorded one."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One kind of recorded error.

    Attributes:
      recorded: The name of its class.
      text: A regular expression that its message matches.
      ours: Classes; on every rank ours is an instance of one of them. LockstepError, which is a
        ValueError and a RuntimeError too, counts only where it is named.
      why: Why that is the same error.
      quoted: A part of the message that ours repeats on every rank.
    """

    recorded: str
    text: str
    ours: tuple[str, ...]
    why: str
    quoted: str = ""


_SAME = "the same built-in class"
_PROGRAM = "raised by the program itself: its own class and text on every rank"
_TREE = "the replicas' trees do not fit together"
_CALLS = "the replicas make different calls"
_MANY = "a value per replica where one value is wanted"

# The first row that fits counts.
ROWS = (
    Row("ValueError", "boom on replica 1", ("ValueError",), _PROGRAM, "boom on replica 1"),
    Row("KeyError", "boom on replica 0", ("KeyError",), _PROGRAM, "boom on replica 0"),
    Row("KeyError", "Duplicate keys", ("KeyError",), _SAME, "Duplicate keys"),
    Row("ZeroDivisionError", "in merge_fn", ("ZeroDivisionError",), _PROGRAM, "in merge_fn"),
    Row("ValueError", "outside of replica_fn", ("ContextError",), "one class for a wrong context"),
    Row("ValueError", r"convert a value \(None\)", ("TypeError",), "None is not an axis"),
    Row("ValueError", "", ("ValueError",), _SAME),
    Row("RuntimeError", "different number of replica_context", ("LockstepError",), _CALLS),
    Row("RuntimeError", "mismatching name", ("LockstepError",), _CALLS),
    Row("RuntimeError", "", ("RuntimeError",), _SAME),
    Row("StopIteration", "", ("StopIteration",), _SAME),
    Row("OutOfRangeError", "End of sequence", ("OutOfRangeError",), "the end, told by a class"),
    Row("InvalidArgumentError", "does not have a value", ("DataError",), "an empty Optional"),
    Row("JSONDecodeError", "", ("JSONDecodeError",), _SAME),
    Row("ImportError", "", ("ImportError",), _SAME),
    Row("AttributeError", "'NoneType'.*'dtype'", ("LeafTypeError",), "None is not an array"),
    Row("AttributeError", "'NoneType'.*'device'", ("StructureError",), "None is no destination"),
    Row("AttributeError", "'int'.*'shape'", ("StructureError",), "as for any other plain number"),
    Row("AttributeError", "_variant_tensor", ("TypeError",), "a list is not a dataset"),
    Row("AttributeError", "'PerReplica'.*'dtype'", ("StructureError",), _MANY),
    Row("TypeError", "for /: 'PerReplica' and 'int'", ("StructureError",), _MANY),
    Row("IndexError", "tuple index", ("StructureError",), "no value per replica"),
    Row("TypeError", "", ("TypeError",), _SAME),
    Row("NotImplementedError", "", ("NotImplementedError",), _SAME),
    Row(
        "AttributeError",
        "'(NoneType|PerReplica)' object has no attribute '(merge_call|all_|numpy)",
        ("AttributeError",),
        _SAME,
    ),
    Row("AssertionError", r"len\(v\)|keys", ("LockstepError",), _TREE),
    Row("AssertionError", "No duplicates", ("ValueError",), "an assertion about an argument"),
    Row(
        "AssertionError",
        "^$",
        ("StructureError", "LockstepError", "TypeError"),
        "a bare assertion; ours says whether a tree or a type is wrong",
    ),
    Row("InvalidArgumentError", "allowed values", ("LeafTypeError",), "a dtype with no reduction"),
    Row("InvalidArgumentError", "scalars|dimensions in", ("AxisError",), "there is no such axis"),
    Row(
        "InvalidArgumentError",
        "AddN|CollectiveReduce|CollectiveGather|ConcatV2|Graph execution",
        ("LockstepError",),
        "shapes differ between replicas",
    ),
    Row("InternalError", "CollectiveReduce", ("LockstepError",), "dtypes differ between replicas"),
)


def row_for(recorded: dict[str, Any]) -> Row | None:
    """Return the row of a recorded error, if there is one."""
    kind, message = recorded["type"], recorded["message"]
    fitting = (row for row in ROWS if row.recorded == kind and re.search(row.text, message))
    return next(fitting, None)


def difference(recorded: dict[str, Any], ours: list[dict[str, Any]]) -> str:
    """Return how our errors, one of each rank, differ from the recorded one, or nothing."""
    kind, message = recorded["type"], recorded["message"]
    row = row_for(recorded)
    if row is None:
        return f"no row of the table of errors fits {kind}: {message}"
    for rank, error in enumerate(ours):
        classes = set(error["classes"])
        stray = "LockstepError" in classes and "LockstepError" not in row.ours
        if stray or not set(row.ours) & classes or row.quoted not in error["message"]:
            found = f"{error['type']} ({error['message'][:200]})"
            return f"recorded {kind} ({message}); rank {rank} raised {found}, expected {row}"
    return ""
