"""Counts what makes code hard to read by its names: empty words, one name of many types, `Any`.

    python tests/tools/naming.py [PACKAGE]

prints a table for each package, or each empty name of one with its places. `tests/test_names.py`
holds the limits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

_EMPTY_TEXT = """
participles, and verbs without an object:
    asked awaited begun called carried changed chosen counted dealt drawn found gave given had held
    kept known learned lent made meant met noted passed said seen shown spoken stood taken told
    took used wanted went worn did does tells says sees makes asks comes gets gives goes has holds
    knows looks meets passes stays takes wants
adverbs and adjectives:
    again ahead alike alone already also apart away back bad beside better else elsewhere enough
    ever everywhere far forth full gone good here how however late later least less likely
    little more most much near never nearly now odd once only own plain ready since so some soon
    sooner still such then there thus together too twice up very well whole wide wrong yet
pronouns and determiners:
    another anybody anything both each either everybody everyone everything few it its itself many
    mine neither nobody none nothing one other others ours several somebody someone something
    that theirs them these they this those
prepositions and conjunctions:
    about above across after along among around as before behind below beneath between beyond by
    down during except for from if in inside instead into near of off on onto or outside over past
    than through throughout till toward towards under unless until upon with within without
question words:
    what whatever when whenever where wherever which whichever while who whoever whom whose why
nouns that stand for any noun:
    info item obj stuff thing things
"""
# Words that name nothing where nothing else is beside them.
EMPTY_WORDS = frozenset(
    word for line in _EMPTY_TEXT.splitlines() if not line.endswith(":") for word in line.split()
)
# Words of Python's and NumPy's own functions: `ufunc.at`, `first`, `last`, `next`, `out`, `where`.
KNOWN_WORDS = frozenset(("at", "first", "last", "next", "out", "other", "all", "any"))
KINDS = ("functions", "arguments", "locals", "attributes")
_SEQUENCE = re.compile(r"\b(Sequence|list|tuple|Iterable|Iterator|Collection)\[(.*?)(, \.\.\.)?\]")
_OPTIONAL = re.compile(r"\s*\|\s*None\b|\bNone\s*\|\s*")
_PREFIX = re.compile(r"\b\w+\.(?=\w)|[\"']")


class NamePlace(NamedTuple):
    """An identifier where it is bound.

    Attributes:
      kind: One of `KINDS`.
      name: The identifier.
      line: Its line in the file.
    """

    kind: str
    name: str
    line: int


class Signature(NamedTuple):
    """The parameters of one function, without ``self`` and ``cls``.

    Attributes:
      path: The file.
      function: Its definition.
      positional: The parameters that may be given by position.
      parameters: All of them.
    """

    path: Path
    function: ast.FunctionDef | ast.AsyncFunctionDef
    positional: list[ast.arg]
    parameters: list[ast.arg]


def is_empty(name: str) -> bool:
    """Whether all words of an identifier name nothing."""
    words = [word for word in name.lower().split("_") if word]
    if len(words) == 1 and words[0] in KNOWN_WORDS:
        return False
    return bool(words) and all(word in EMPTY_WORDS or word in KNOWN_WORDS for word in words)


def bound_names(tree: ast.AST) -> Iterator[NamePlace]:
    """The identifiers that a tree binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not (node.name.startswith("__") and node.name.endswith("__")):
                yield NamePlace("functions", node.name, node.lineno)
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield NamePlace("arguments", node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield NamePlace("locals", node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield NamePlace("attributes", node.attr, node.lineno)


def files_by_package(root: Path) -> dict[str, list[Path]]:
    """The Python files of a tree by its first level; files of the root itself are in ``""``."""
    packages: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        packages[parts[0] if len(parts) > 1 else ""].append(path)
    return packages


def count_empty(paths: list[Path]) -> dict[str, tuple[list[str], int]]:
    """For each kind of identifier, the empty with their places, and the number of all."""
    empty: dict[str, list[str]] = {kind: [] for kind in KINDS}
    totals = Counter(dict.fromkeys(KINDS, 0))
    for path in paths:
        for kind, name, line in bound_names(ast.parse(path.read_text())):
            totals[kind] += 1
            if is_empty(name):
                empty[kind].append(f"{path.relative_to(ROOT)}:{line} {name}")
    return {kind: (empty[kind], totals[kind]) for kind in KINDS}


def signatures(paths: list[Path]) -> Iterator[Signature]:
    """The parameters of every function of some files."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                listed = node.args
                positional = [
                    parameter
                    for parameter in [*listed.posonlyargs, *listed.args]
                    if parameter.arg not in ("self", "cls")
                ]
                collected = [p for p in (listed.vararg, listed.kwarg) if p is not None]
                yield Signature(
                    path, node, positional, [*positional, *listed.kwonlyargs, *collected]
                )


def plain_type(annotation: str) -> str:
    """An annotation without its optional part, module prefixes, and the kind of its sequence."""
    text = _PREFIX.sub("", annotation)
    text = _OPTIONAL.sub("", text)
    return _SEQUENCE.sub(r"[\2]", text)


def types_by_argument(paths: list[Path]) -> dict[str, Counter[str]]:
    """For each name of an argument the types that it is annotated with, `Any` not counted."""
    types: dict[str, Counter[str]] = defaultdict(Counter)
    for signature in signatures(paths):
        for parameter in signature.parameters:
            if parameter.annotation is not None:
                text = plain_type(ast.unparse(parameter.annotation))
                if text != "Any":
                    types[parameter.arg][text] += 1
    return types


def blank_unpackings(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and targets of a file that unpack a tuple with more than one ``_``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
            blanks = [e for e in node.elts if isinstance(e, ast.Name) and not e.id.strip("_")]
            if len(blanks) > 1:
                yield node.lineno, ast.unparse(node)


def share_of_any(paths: list[Path]) -> tuple[int, int]:
    """How many parameters are annotated with nothing but `Any`, and how many there are."""
    annotations = [p.annotation for s in signatures(paths) for p in s.parameters]
    unknown = [a for a in annotations if a is not None and ast.unparse(a) == "Any"]
    return len(unknown), len(annotations)


def main() -> None:
    """Print the table, or the empty names of one package."""
    packages = files_by_package(ROOT / "mpistrat")
    if len(sys.argv) > 1:
        for kind, (places, _) in count_empty(packages[sys.argv[1]]).items():
            print("\n".join(f"{kind:10} {place}" for place in places))
        return
    print(f"{'package':14}" + "".join(f"{kind:>20}" for kind in KINDS) + f"{'Any':>18}")
    for package, paths in packages.items():
        cells = [f"{len(places)} of {total}" for places, total in count_empty(paths).values()]
        unknown, total = share_of_any(paths)
        cells.append(f"{unknown} of {total}")
        print(f"{package or '(top)':14}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
