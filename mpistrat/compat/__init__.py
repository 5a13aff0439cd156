"""Names of other libraries, so that programs written for them run.

- `tf`: the few ``tf.*`` names that code for tf.distribute without models needs.
- `v1`: ``tf.compat.v1``, whose strategies have older signatures.
- `absent`: what names that are not here say.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["tf", "v1"]

if TYPE_CHECKING:
    from mpistrat.compat import tf, v1


def __getattr__(name: str) -> Any:
    if name in __all__:  # when first used: other rooms import `absent` alone
        return importlib.import_module(f"mpistrat.compat.{name}")
    raise AttributeError(f"module 'mpistrat.compat' has no attribute {name!r}")
