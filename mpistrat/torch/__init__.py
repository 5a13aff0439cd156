"""Models of PyTorch on many ranks."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("mpistrat.torch needs PyTorch: pip install 'mpistrat[torch]'.") from error

__all__: list[str] = []
