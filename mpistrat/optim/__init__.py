"""Optimizers as data: hyper-parameters as frozen values, one file each, and loops over memory.

All but `Optimizer.apply_gradients` and what it is made of is pure: nothing communicates, and no
variable is known. `mpistrat.optim.passes` tells how gradients of several ranks, weights and state
pass through the loops; `folded` how they come there, `state` what is remembered.
"""

from __future__ import annotations

from mpistrat.optim.adam import Adam, AdamW
from mpistrat.optim.clipping import ClipByGlobalNorm, ClipByValue
from mpistrat.optim.groups import Group
from mpistrat.optim.lamb import LAMB
from mpistrat.optim.lars import LARS
from mpistrat.optim.lion import Lion
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.progress import LossScale
from mpistrat.optim.schedules import Constant, Cosine, Linear, Schedule, Steps, WarmUp
from mpistrat.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "ClipByGlobalNorm",
    "ClipByValue",
    "Constant",
    "Cosine",
    "Group",
    "Linear",
    "Lion",
    "LossScale",
    "Optimizer",
    "Schedule",
    "Steps",
    "WarmUp",
]

# Every optimizer, by the name that programs choose it by; a new one is a file and a row.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "lamb": LAMB,
    "lars": LARS,
    "lion": Lion,
}
