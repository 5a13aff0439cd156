"""Optimizers: hyper-parameters as frozen values, state in variables, and loops over memory.

An optimizer is a frozen dataclass with a rule: loops that change weights and slots in place, given
the gradient and a few numbers of the step. `Optimizer.apply_gradients` checks the gradients, makes
one handshake, reduces them over the replicas and updates weights and slots; each rank processes its
part of all large variables in one pass over memory, in blocks that stay in the cache. The room
promises that weights and state have the same bits on every rank, with compiled loops and without;
that an error is raised on all ranks; and that no gradient that is not finite reaches a weight
unless the program asks for it.

Begin with `sgd` (a whole optimizer in a file), then `base`, `optimizer` and `apply`, which calls
the others in the order of a call. Modules that do not communicate:

- `base`: hyper-parameters, groups, clipping, loss scale, counters (`Progress`), rules (`Rule`).
- `adagrad`, `adam`, `lamb`, `lars`, `lion`, `rmsprop`, `sgd`: one optimizer each, with its loops
  and their references.
- `schedules`: learning rates as functions of the step, with the same bits on every processor.
- `words`: names of arguments in other libraries, for error texts.
- `passes`: gradients of several ranks, weights and state pass through the loops, block by block.
- `blocks`: loops over a block of a gradient.
- `fused`: small variables that are updated as one.

Modules that `apply_gradients` is made of:

- `optimizer`: the base class with its public methods.
- `apply`: the call from the handshake to the report of a failure; `flush` and `discard`.
- `gradient_validation`: the checks of the arguments, before anything communicates.
- `state`: counters and slots as variables.
- `update_plan`: facts that depend only on the variables of a call.
- `reduced`: gradients of all replicas, reduced as far as they have to be.
- `updating`: one update of all variables: norms, weights, slots, rows of `IndexedSlices`.
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
    name.lower(): optimizer_class
    for name, optimizer_class in list(globals().items())
    if Optimizer in getattr(optimizer_class, "__mro__", ())[1:]
}
