"""The programming model of tf.distribute for NumPy on MPI; one MPI rank is one replica.

Importing mpistrat starts neither MPI nor Numba: names are bound when they are first used, and MPI
starts when the first strategy is made. The public names are the rows of ``__init__.pyi``, which
type checkers read as it is.
"""

from __future__ import annotations

import importlib

from mpistrat.bytecode import install_finder as _use

__version__ = "0.1.0"  # CITATION.cff repeats it

_use(__path__[0])
importlib.import_module("mpistrat.config").check_system()

__all__, __getattr__, __dir__ = importlib.import_module("mpistrat.names").bind_public_names(
    __name__, __file__
)
__all__ += ["__version__"]
__all__.sort()
