"""The recorded programs in mpistrat: ``PROGRAMS[name](strategy, n, comm)`` runs on every rank."""

from __future__ import annotations

from . import (
    all_gather,
    all_reduce,
    central,
    contexts,
    datasets,
    extended,
    merging,
    one_device,
    options,
    reductions,
    resolvers,
    running,
    variables,
)

_MODULES = (
    running,
    merging,
    all_reduce,
    all_gather,
    reductions,
    datasets,
    variables,
    extended,
    contexts,
    options,
    resolvers,
    one_device,
    central,
)

PROGRAMS = {program.__name__: program for module in _MODULES for program in module.PROGRAMS}
