"""Loops over arrays: reduce operations and local sums, in Numba, each beside its NumPy twin.

Importing this package, or any module in it, does not import Numba: the first call of a kernel does.
"""
