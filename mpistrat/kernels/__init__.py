"""Compiled loops over arrays, each with a NumPy reference: reductions, sums, random numbers.

Importing this package, or any module in it, does not import Numba: the first call of a kernel does.
To add a kernel, read `jit`; for reductions, begin with `reduce_rows` in `rows`.

The room promises the same bits. Every element is reduced in rank order, by the same loop or its
NumPy reference, whichever rank does it, whatever the number of threads, and wherever the result
goes; so within a node results do not depend on the MPI library. Where two NaNs or complex numbers
are combined, a loop may produce other bits in its last elements than in the rest, so all ranks that
reduce the same values for themselves split them at the same positions. A NaN that MPI has reduced,
or that is added to a variable, is replaced by the usual one (`normalize_nans`), because MPI
libraries leave different bits of it, and nodes of different sizes split variables at different
positions.

A reduction of 2^18 columns or more waits for the compiler. Once the loop of a dtype has been
compiled for a call, smaller reductions use it too. The session counts these calls, so the decision
is the same on all ranks; it does not depend on the process.

With equal weights the sum of a mean may overflow. That is detected (by the floating-point flags
that NumPy reads, by loops that check each tile while it is in cache, and by a check of sums from
MPI), and the means that are not finite are computed again from values scaled by a power of two. On
several nodes this applies to the sum of a node (`sum_partly`).

- `jit`: compilation, references, and the cache on disk.
- `ops`: the reduce operations.
- `rows`, `loops`: reductions of the rows of a matrix; the choice of the loop, and the loops.
- `elementwise`: scaling, NaNs, means that overflow, copies past the caches.
- `local_sums`: sums of one rank over axes of an array.
- `philox`: words of random numbers.
- `threads`: the threads of a rank, and limits for those of other libraries.
"""
