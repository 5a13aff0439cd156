"""PyTorch models on many ranks: ``import mpistrat.torch as mt``.

Importing it registers the backend ``"mpistrat"`` of torch.distributed, and changes nothing else.

For maintainers: the room promises that tensors work as leaves of every call of mpistrat, that the
parameters of a replicated model have the same bits on all ranks after each step of an optimizer,
and that every collective of torch.distributed is compared between ranks before data moves. Begin
with `ddp.gradients` for models and with `process_group.backend` for torch.distributed. The modules:

- `tensors`: the conversion of tensors to arrays and back, for `mpistrat.arrays`.
- `items`, `batches`: datasets of PyTorch as sources, and batches of tensors.
- `states`: modules, optimizers, schedulers and generators in checkpoints.
- `functions`: collectives that gradients pass, and batch normalisation over all ranks.
- `ddp`: `replicate`, which gives a model the same gradients on all ranks.
- `fused`, `param_groups`: optimizers of `mpistrat.optim` for replicated models.
- `views`: tensors as the memory that the backend moves and reduces.
- `process_group`: the backend of torch.distributed.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("mpistrat.torch needs PyTorch: pip install 'mpistrat[torch]'.") from error

from mpistrat.torch.batches import batches
from mpistrat.torch.ddp.replicate import no_sync, replicate, take_part
from mpistrat.torch.functions import SyncBatchNorm, all_gather, all_reduce
from mpistrat.torch.fused import FusedOptimizer
from mpistrat.torch.process_group.backend import init_process_group, register

__all__ = [
    "FusedOptimizer",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "batches",
    "init_process_group",
    "no_sync",
    "replicate",
    "take_part",
]

register()
