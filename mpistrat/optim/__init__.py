"""Optimizers as data: hyper-parameters as frozen values, one file each, and loops over memory.

Everything except `Optimizer.apply_gradients` and the modules it calls is pure: it does not
communicate, and knows no variables. `mpistrat.optim.passes` tells how gradients of several ranks,
weights and state pass through the loops; `reduced` how they come there, `state` what is remembered.
"""

from __future__ import annotations

from mpistrat.optim.adagrad import Adagrad as Adagrad
from mpistrat.optim.adam import Adam as Adam
from mpistrat.optim.adam import AdamW as AdamW
from mpistrat.optim.base import ClipByGlobalNorm as ClipByGlobalNorm
from mpistrat.optim.base import ClipByValue as ClipByValue
from mpistrat.optim.base import Group as Group
from mpistrat.optim.base import LossScale as LossScale
from mpistrat.optim.lamb import LAMB as LAMB
from mpistrat.optim.lars import LARS as LARS
from mpistrat.optim.lion import Lion as Lion
from mpistrat.optim.optimizer import Optimizer as Optimizer
from mpistrat.optim.rmsprop import RMSprop as RMSprop
from mpistrat.optim.schedules import Constant as Constant
from mpistrat.optim.schedules import Cosine as Cosine
from mpistrat.optim.schedules import Linear as Linear
from mpistrat.optim.schedules import Schedule as Schedule
from mpistrat.optim.schedules import Steps as Steps
from mpistrat.optim.schedules import WarmUp as WarmUp
from mpistrat.optim.sgd import SGD as SGD

__all__ = sorted(["OPTIMIZERS", *(name for name in globals() if name[0].isupper())])

# Every optimizer, by the name that programs choose it by.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): found
    for name, found in list(globals().items())
    if Optimizer in getattr(found, "__mro__", ())[1:]
}
