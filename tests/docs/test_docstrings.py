"""Every public name has a docstring in the form that the project uses."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
from every import every
from public_names import entries, members, namespaces

# What a body does that communicates; the words of this library, and calls of its own that do.
COMMUNICATES = re.compile(
    r"\.handshake\(|\.(compare|gather)_(payloads|rows)\(|\.bcast\(|reduce_over_\w+\(|reduce_in_replica\(|\.regroup_tree\(|regrouper\.\w+\("
    r"|DistributedDataset\(|\bupdate_(each|non_slot)\("
    r"|\b_?write\(|[^.\w]gather\(|\brun\(self|strategy\.run\(|self\.experimental_local_results\("
)
TELLS = re.compile(r"collective|communicat", re.IGNORECASE)
# "as `assign` in all else": what is said there holds here.
ELSEWHERE = re.compile(
    r"\b(?:as|see|[Ll]ike|name of|spelling of) (?:in |that of |one )?`[\w.]+`", re.I
)
NOTHING = (None, "None", "NoReturn", inspect.Parameter.empty)


def section(doc, name):
    return re.search(rf"^{name}[:.](?=\s|$)", doc, re.MULTILINE)


def missing_arguments(function, doc):
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls") and parameter.kind not in variadic
    ]
    told = re.search(r"^(?:Args|Attributes):", doc, re.MULTILINE)
    listed = doc[told.end() :] if told else ""
    return [
        name
        for name in names
        if not re.search(rf"^\s+{name}:", listed, re.MULTILINE)
        and not re.search(rf"`[^`]*\b{name}\b[^`]*`", doc)
    ]


def inherited(cls, name):
    """The docstrings of a method in a class and its bases: an override says what is new."""
    return "\n".join(
        inspect.cleandoc(getattr(vars(base)[name], "__doc__", None) or "")
        for base in cls.__mro__
        if name in vars(base)
    )


def source(function):
    """Its text; nothing for what a dataclass has made."""
    made = function.__code__.co_filename == "<string>"
    return "" if made else textwrap.dedent(inspect.getsource(function))


def raises(function):
    tree = ast.parse(source(function))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def faults(function, above=""):
    """What the docstring of a function lacks; `above` are those of what it overrides."""
    doc = inspect.getdoc(function) or ""
    first, elsewhere = doc.split("\n")[0], ELSEWHERE.search(doc)
    if not first.endswith("."):
        yield f"its first line is not a sentence: {first!r}"
    missing = [] if elsewhere else missing_arguments(function, f"{doc}\n{above}")
    if missing:
        yield f"says nothing of {', '.join(missing)}"
    returned = inspect.signature(function).return_annotation not in NOTHING
    told = section(doc, "Returns") or section(doc, "Yields") or re.search(r"\breturn", first, re.I)
    if returned and not (told or elsewhere or re.match(r"Tell|Iterate", first)):
        yield "does not say what it returns"
    if raises(function) and not (section(doc, "Raises") or "Raise" in first):
        yield "raises, and does not say what"
    if COMMUNICATES.search(source(function)) and not TELLS.search(doc):
        yield "communicates, and does not say so"
    if section(doc, "Collective") and not (re.search(r"\bCost:", doc) or elsewhere):
        yield "is collective, and does not say at what cost"


def class_faults(cls):
    doc = inspect.getdoc(cls) or ""
    if not doc.split("\n")[0].endswith("."):
        yield "its first line is not a sentence"
    # Programs make no exceptions of ours, and refused classes cannot be made.
    made = "__init__" in vars(cls) and not issubclass(cls, Exception)
    if made and inspect.isfunction(cls.__init__):
        both = f"{doc}\n{inspect.getdoc(cls.__init__) or ''}"
        missing = missing_arguments(cls.__init__, both)
        if missing:
            yield f"says nothing of {', '.join(missing)}"
        if raises(cls.__init__) and not section(both, "Raises"):
            yield "raises when it is made, and does not say what"


def described():
    """Every name that is described at home: the public ones and the members of public classes."""
    for entry in entries():
        if entry.home != entry.path or not callable(entry.value):
            continue
        if not str(getattr(entry.value, "__module__", "")).startswith("mpistrat"):
            continue
        yield entry.path, (entry.value, "")
        if inspect.isclass(entry.value):
            for name, value in members(entry.value).items():
                yield f"{entry.path}.{name}", (value, inherited(entry.value, name))


NAMES = dict(described())


@every("path", NAMES)
def test_what_is_public_is_described(path):
    value, above = NAMES[path]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if inspect.isclass(value):
        found = list(class_faults(value))
    elif inspect.isfunction(value):
        found = list(faults(value, above))
    elif isinstance(value, property):
        found = (
            [] if (inspect.getdoc(value) or "").split("\n")[0].endswith(".") else ["no sentence"]
        )
    else:
        found = [] if inspect.getdoc(value) else ["no docstring"]  # a member of an enumeration
    assert not found, f"{path} {'; '.join(found)}"


@every("name", namespaces())
def test_namespaces_are_described(name):
    assert (namespaces()[name].__doc__ or "").split("\n")[0].endswith(".")


def test_the_names_are_found():
    for path in [
        "mpistrat.MirroredStrategy",
        "mpistrat.Strategy.run",
        "mpistrat.Variable.read_value",
        "mpistrat.VariableAggregation.SUM",
        "mpistrat.cluster_resolver.ClusterSpec.as_dict",
        "mpistrat.compat.tf.constant",
        "mpistrat.testing.inject",
    ]:
        assert path in NAMES
    assert not any("._" in path for path in NAMES)


@pytest.mark.parametrize("path", ["Strategy.run", "Strategy.reduce", "ReplicaContext.all_gather",
                                  "Variable.assign", "StrategyExtended.update"])  # fmt: skip
def test_what_communicates_is_recognised(path):
    assert COMMUNICATES.search(source(NAMES[f"mpistrat.{path}"][0]))


def test_the_rule_sees_what_is_missing():
    def bad(self, value) -> int:
        """Do it"""
        if value:
            raise ValueError(value)
        return self.lockstep.handshake("bad")

    def costless() -> None:
        """Meet.

        Collective: all do.
        """

    def good(self, value) -> int:
        """Meet.

        Collective: all do.

        Args:
          value: What to bring.

        Returns:
          A number.

        Raises:
          ValueError: It is nothing.

        Cost: one handshake.
        """
        if value:
            raise ValueError(value)
        return self.lockstep.handshake("good")

    assert len(list(faults(bad))) == 5
    assert list(faults(costless)) == ["is collective, and does not say at what cost"]
    assert list(faults(good)) == []
