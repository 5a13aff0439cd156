"""How a recorded value and ours are compared."""

from __future__ import annotations

import math
from typing import Any

from .errors import difference

# Relative tolerance by dtype: a few units in the last place, for sums folded in another order.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "complex64": 1e-6}
FINEST = 1e-12
EQUAL, WRAPPED, DIFFERENT = "equal", "wrapped", "different"


class Comparison:
    """Compares one recorded value with ours.

    Attributes:
      wrapped: Whether somewhere ours is a `PerReplica` of n values that each equal the plain value
        recorded there (decision D2).
      problem: What else is different; empty if nothing is.
    """

    def __init__(self, recorded: Any, ours: Any):
        self.wrapped = False
        self.problem = self._compare(recorded, ours, "")

    def _compare(self, want: Any, got: Any, at: str) -> str:
        want = normal(want)
        kinds = (want["kind"], got["kind"])
        if got["kind"] == "PerReplica" and _is_leaf(want):
            self.wrapped = True
            return self._all([want] * len(got["values"]), got["values"], at)
        if got["kind"].endswith("Variable"):
            return self._variable(want, got, at)
        if kinds[0] != kinds[1]:
            return f"{at}: recorded {show(want)}, got {show(got)}"
        match want["kind"]:
            case "number":
                return _numbers(want, got, at)
            case "PerReplica" | "Mirrored":
                return self._all(want["values"], got["values"], at)
            case "tuple" | "list":
                return self._all(want["items"], got["items"], at)
            case "IndexedSlices":
                parts = ("values", "indices", "dense_shape")
                return self._all([want[p] for p in parts], [got[p] for p in parts], at)
            case "dict" | "namedtuple":
                part = "items" if want["kind"] == "dict" else "fields"
                if want["type"] != got["type"] or list(want[part]) != list(got[part]):
                    return f"{at}: recorded {show(want)}, got {show(got)}"
                return self._all(list(want[part].values()), list(got[part].values()), at)
        return "" if want == got else f"{at}: recorded {show(want)}, got {show(got)}"

    def _all(self, wants: list[Any], gots: list[Any], at: str) -> str:
        if len(wants) != len(gots):
            return f"{at}: recorded {len(wants)} values, got {len(gots)}"
        pairs = enumerate(zip(wants, gots, strict=True))
        found = (self._compare(w, g, f"{at}/{i}") for i, (w, g) in pairs)
        return next((problem for problem in found if problem), "")

    def _variable(self, want: Any, got: Any, at: str) -> str:
        # Writes give the variable back. It stands for its copies where a value per replica is
        # recorded, and for what reading it gives where one value is.
        if want["kind"] in ("PerReplica", "Mirrored"):
            return self._all(want["values"], got["values"], at)
        if want["kind"] == "number" and "read" in got:
            return self._compare(want, got["read"], at)
        for fact in ("kind", "name", "dtype", "aggregation"):
            if want.get(fact) != got[fact]:
                return f"{at}: recorded {fact} {want.get(fact)}, got {got[fact]}"
        return self._all(want["values"], got["values"], at)


def _is_leaf(want: Any) -> bool:
    """Tell whether run would wrap such a value; it does not wrap None."""
    return want["kind"] in ("number", "py") and want["value"] is not None


def normal(value: Any) -> Any:
    """Return a recorded value, with one kind for tensors, arrays, numbers and copies."""
    if isinstance(value, list):  # one program recorded a bare list of values
        return {"kind": "list", "items": value}
    kind = value["kind"]
    if kind in ("Tensor", "ndarray"):
        return {**value, "kind": "number"}
    if kind == "npscalar":
        return {**value, "kind": "number", "shape": []}
    if kind == "py" and value["type"] in ("bool", "int", "float"):
        dtype = f"python {value['type']}"
        return {"kind": "number", "dtype": dtype, "shape": [], "value": value["value"]}
    if kind in ("ResourceVariable", "_UnreadVariable"):
        return {**value, "kind": "number", "shape": _shape(value["value"])}
    return value


def _shape(value: Any) -> list[int]:
    return [len(value), *_shape(value[0])] if isinstance(value, list) else []


def _numbers(want: Any, got: Any, at: str) -> str:
    if not _same_dtype(want["dtype"], got["dtype"]) or want["shape"] != got["shape"]:
        return f"{at}: recorded {show(want)}, got {show(got)}"
    names = (want["dtype"], got["dtype"])
    tolerance = next((TOLERANCE[n] for n in names if n in TOLERANCE), FINEST)
    if _near(want["value"], got["value"], tolerance):
        return ""
    return f"{at}: recorded {show(want)}, got {show(got)}"


def _same_dtype(want: str, got: str) -> bool:
    """Tell whether dtypes agree; a Python number agrees with any of its kind.

    Python numbers become int32 and float32 there, and stay what they are here.
    """
    if want == got or "python" not in f"{want} {got}":
        return want == got
    return _dtype_kind(want) == _dtype_kind(got)


def _dtype_kind(name: str) -> str:
    return name.removeprefix("python ").strip("0123456789").removeprefix("u")


def _near(want: Any, got: Any, tolerance: float) -> bool:
    if isinstance(want, list) or isinstance(got, list):
        same = isinstance(want, list) and isinstance(got, list) and len(want) == len(got)
        return same and all(_near(w, g, tolerance) for w, g in zip(want, got, strict=True))
    if isinstance(want, dict):
        return all(_near(want[part], got[part], tolerance) for part in ("re", "im"))
    if isinstance(want, float) and isinstance(got, float | int):
        return math.isclose(want, got, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return bool(want == got)


def show(value: Any) -> str:
    """Return a recorded or written value as messages show it."""
    kind = value["kind"]
    if kind == "number":
        shape = "" if 0 not in value["shape"] else str(value["shape"])
        return f"{value['dtype']}:{value['value']}{shape}"
    if kind == "py":
        return repr(value["value"])
    if kind in ("tuple", "list"):
        return f"{kind}({', '.join(show(normal(v)) for v in value['items'])})"
    if kind == "IndexedSlices":
        return f"{kind}({', '.join(show(normal(value[p])) for p in list(value)[1:])})"
    if "values" in value:
        return f"{kind}{{{' | '.join(show(normal(v)) for v in value['values'])}}}"
    parts = value.get("items") or value.get("fields") or {}
    shown = [f"{name}: {show(normal(part))}" for name, part in parts.items()]
    return f"{kind} {value.get('type')}({', '.join(shown)})"


def compare(recorded: dict[str, Any], ours: dict[str, Any]) -> tuple[str, str]:
    """Return `EQUAL`, `WRAPPED` or `DIFFERENT`, and what is different."""
    if "error" in recorded and "error" in ours:
        problem = difference(recorded["error"], ours["error"])
        return (DIFFERENT, problem) if problem else (EQUAL, "")
    if "ok" in recorded and "ok" in ours:
        found = Comparison(recorded["ok"], ours["ok"])
        if found.problem:
            return DIFFERENT, found.problem
        return (WRAPPED if found.wrapped else EQUAL), ""
    return DIFFERENT, f"recorded {describe(recorded)}, got {describe(ours)}"


def describe(outcome: dict[str, Any]) -> str:
    """Return a recorded result or an outcome as messages show it."""
    if "ok" in outcome:
        return show(normal(outcome["ok"]))
    if "ranks" in outcome:
        each = [f"rank {rank}: {show(value)}" for rank, value in enumerate(outcome["ranks"])]
        return "different values: " + "; ".join(each)
    if "error" in outcome:
        errors = outcome["error"] if isinstance(outcome["error"], list) else [outcome["error"]]
        return "; ".join(f"{e['type']} ({e['message'][:160]})" for e in errors)
    return str(outcome)
