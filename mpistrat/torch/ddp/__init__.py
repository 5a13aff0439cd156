"""Replicated models: the same gradients on all ranks after each backward pass.

After `replicate.replicate` all ranks have the same weights, and each backward pass outside of
`no_sync` ends in one all-reduce of all gradients. Their mean counts each rank by its number of
rows. A rank without rows takes part. An error of one rank is an error on all ranks; no rank hangs,
and none trains on gradients of its own without an error.

A backward pass on the CPU runs in the thread that calls it, so it can end in a collective call. The
gradient of an output of the model opens the pass and counts its rows. The hook of each parameter
copies its gradient to a buffer of `Strategy.gradient_buffers` while it is in cache (past the caches
if the model is large), and ``p.grad`` is a view of that buffer from then on. A callback of the
engine reduces all buffers in one call, with a number for each parameter that shows whether any rank
has used it. With a `FusedOptimizer` the reduction is part of ``apply_gradients`` instead.

Begin with `gradients`. The modules:

- `replicate`: the public functions, and the class of replicated models.
- `gradients`: what happens in a backward pass, and the reduction.
- `parameters`: the buffers of gradients, and checks that the parameters stay the same.
- `rows`: the number of rows of a call, and the output of a model without rows.
- `stepping`: checks before each step of ``torch.optim``.
"""
