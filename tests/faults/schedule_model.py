"""What a program must give on every rank, in plain NumPy: nothing of the library is called."""

from __future__ import annotations

from typing import Any

import numpy as np
from schedule_programs import (
    DTYPES,
    ON_READ,
    ON_WRITE,
    Op,
    Program,
    batches,
    is_local,
    leaves,
    start,
    value,
)

_FOLDS = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PROD": np.prod}


def _fold(how: str, parts: list[np.ndarray]) -> np.ndarray:
    stack = np.stack(parts)
    if how != "MEAN":
        return np.asarray(_FOLDS[how](stack, axis=0)).astype(stack.dtype)
    wide = np.float32 if stack.dtype.itemsize < 4 else np.float64
    kept = stack.dtype if stack.dtype.kind == "f" else wide
    return np.asarray((stack.astype(np.float64).sum(axis=0) / len(parts)).astype(kept))


class Model:
    """All copies of all variables, and what each call gives."""

    def __init__(self, size: int):
        self.size = size
        self.copies = {name: [start(name) for _ in range(size)] for name in ON_WRITE + ON_READ}

    def bits(self) -> dict[str, bytes]:
        """Return the bytes of the variables whose copies are equal."""
        return {name: self.copies[name][0].tobytes() for name in ON_WRITE}

    def give(self, op: Op) -> list[list[np.ndarray]]:
        """Do a call; return the leaves of what each rank gets."""
        given = [leaves(value(op, rank)) for rank in range(self.size)]
        if op.kind in ("write", "own", "update", "merge", "assign"):
            return self._write(op, [leaf for (leaf,) in given])
        return [self._same(op, given)] * self.size

    def _same(self, op: Op, given: list[list[np.ndarray]]) -> list[np.ndarray]:
        columns = [list(column) for column in zip(*given, strict=True)]
        if op.kind == "all_gather":
            return [np.concatenate(columns[0])]
        if op.kind == "create":
            return given[0]
        if op.kind == "data":
            rows, size = batches(op)
            return [rows[i : i + size].sum(axis=0) for i in range(0, len(rows), size)]
        if op.kind == "read":
            copies = self.copies[op.var]
            return copies[:1] if op.var == "read_first" else [_fold(op.var[5:].upper(), copies)]
        return [_fold(op.how, column) for column in columns]

    def _write(self, op: Op, given: list[np.ndarray]) -> list[list[np.ndarray]]:
        dtype = DTYPES.get(op.var, np.int64)
        if op.kind == "merge":
            given = [_fold("SUM", given)] * self.size
        elif op.kind == "write":
            given = [one.astype(dtype) for one in given]
            folds = op.var in ("sum", "mean")
            given = [_fold(op.var.upper(), given) if folds else given[0]] * self.size
        elif op.kind == "assign" and op.var == "read_sum":  # the sum of the copies is what is given
            given = [one // self.size for one in given]
        keep, sign = {"assign": (0, 1), "assign_add": (1, 1), "assign_sub": (1, -1)}[op.how]
        copies = self.copies[op.var]
        for rank, new in enumerate(given):
            copies[rank] = (keep * copies[rank] + sign * new).astype(dtype)
        return [[] if op.kind == "assign" else [copy] for copy in copies]


class Expected:
    """What must have come of a program up to its fault.

    Attributes:
      results: For every call before the fault, the leaves that each rank gets.
      bits: The copies of the ON_WRITE variables at the end: what all had written by the fault.
      loose: The numbers of calls that a rank may do after the fault, since they are its own.
    """

    def __init__(self, program: Program):
        """Do the calls up to the fault."""
        model, fault = Model(program.size), program.fault
        self.results: dict[int, list[list[np.ndarray]]] = {}
        self.bits = model.bits()
        self.loose = {op.key for step, op in program.ops() if is_local(step, op)}
        for step in program.steps:
            for op in step.ops:
                # What all ranks have written alike stays, proved or not.
                self.bits = model.bits()
                if fault is not None and op.key == fault.key:
                    return
                self.results[op.key] = model.give(op)
            self.bits = model.bits()


def after(program: Program) -> dict[int, Any]:
    """Return what the steps after a fault must give, with all variables as at the start."""
    model = Model(program.size)
    return {op.key: model.give(op) for step in program.after for op in step.ops}
