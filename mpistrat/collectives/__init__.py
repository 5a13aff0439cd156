"""All-reduces and all-gathers of lists of arrays.

The rooms above flatten trees, check leaves, and call this one with arrays. It promises them that
every rank has the same bits in the end, and that an error is raised on all ranks or ends the job:
everything that can fail is done before the handshake, and only MPI and loops follow it.

A call's text, its buckets and the places of its leaves follow from the operation, the structure,
the shapes and the dtypes. A `ReductionPlan` holds them; it is immutable, and a `PlanCache` keeps it
together with the algorithms that were chosen for it. Whatever changes with each call (values,
weights, the call that made the values) is in its `ReductionInputs`. A call whose plan cannot be
kept makes a plan for itself and takes the same algorithm, so two ranks cannot differ in how they
reduce. If a leaf differs on one rank, then the text and its digest differ too, and the handshake
fails.

Begin with `plan`, then `allreduce` and `algorithms`; one file there is one way to move the bytes.

- `communication`: the options of a call: its time limit, and the dtype between nodes.
- `dtypes`: the dtype in which a value travels, and the dtype of its result.
- `weights`: the weights of a mean as factors and divisors.
- `layout`: buckets of leaves, and columns of matrices in shared memory.
- `plan`: the plan of an all-reduce, and its inputs.
- `plan_cache`: the plans of calls that repeat.
- `reducer`: the handshake, the shared memory and the options of a strategy's calls; all-gather.
- `allreduce`: the choice of an algorithm for a call, and its run.
- `algorithms`: the algorithms of all-reduces, and the table that orders them.
- `results`: the memory that results are written to.
- `node`: reduction in the shared memory of a node.
- `inter_node`: reduction between nodes, and by the MPI library.
- `overlap`: all-reduces that continue between nodes while the program computes.
"""
