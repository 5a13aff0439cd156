"""Models of PyTorch on many ranks: ``import mpistrat.torch as mt``."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("mpistrat.torch needs PyTorch: pip install 'mpistrat[torch]'.") from error

from mpistrat.torch.functions import SyncBatchNorm, all_gather, all_reduce
from mpistrat.torch.fused import FusedOptimizer
from mpistrat.torch.replicate import no_sync, replicate, take_part

__all__ = [
    "FusedOptimizer",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "no_sync",
    "replicate",
    "take_part",
]
