"""JAX with mpistrat: arrays and trees go in and come out as JAX arrays."""

from __future__ import annotations

__all__: list[str] = []
