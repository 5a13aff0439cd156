"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat.compat import tf as tf
from mpistrat.compat import v1 as v1
