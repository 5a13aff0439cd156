"""PyTorch over mpistrat; the only room that imports torch.

Importing it registers the backend ``"mpistrat"`` of torch.distributed.
"""

from __future__ import annotations

from mpistrat.torch.backend import init_process_group, register

__all__ = ["init_process_group"]

register()
