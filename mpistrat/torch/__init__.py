"""PyTorch models on many ranks: ``import mpistrat.torch as mt``.

Importing it registers the backend ``"mpistrat"`` of torch.distributed, and changes nothing else.
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
