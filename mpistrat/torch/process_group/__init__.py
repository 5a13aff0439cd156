"""The backend of torch.distributed: process groups whose calls are checked before data moves.

Each group has two communicators: one for messages, and one for collectives, with a `Session` that
no thread owns and a `Lockstep` of its own. The rule that collectives belong to the thread of the
strategy has this exception: the calls of a group are made one at a time, in the order in which the
program called them, by one thread at a time. The program's thread makes synchronous calls; the
worker of the group makes calls with ``async_op=True``, unless the program waits for them before the
worker has begun. A synchronous call while others are queued is made after them. On a rank with one
core the worker pauses during a backward pass, and a callback of the engine makes the calls at its
end. A call by a callback of another call is made in that call's turn. The handshake is made in the
turn of a call, so ``async_op=True`` does not wait for it. ``send`` and ``recv`` have no handshake
and are not queued.

``wait()`` raises the error of a call, and a future raises it in a callback of another future. An
error for which nobody has waited is raised on all ranks by the next synchronous call, or by any
call once the work object is gone, or at the end of the program. So a program may hold unfinished
work while it starts more, as DistributedDataParallel and FullyShardedDataParallel do.

A call that waits for other ranks tests at first without a pause, then with short pauses, until
torch's timeout. A call that has timed out may still be answered later, so its group cannot be used
any more: each later call raises the same error, and the job ends at exit. A ``recv`` that has timed
out is cancelled, and its group remains usable. The group of all ranks is created once and is kept
after ``destroy_process_group``.

Begin with `backend`, then `channel`. The modules:

- `backend`: the process group, its rendezvous, and the communicators of all groups.
- `group_calls`: the collective methods of a process group.
- `channel`: the sequence of calls of one group.
- `work`: the objects for which a program waits, and the worker.
- `calls`: a handshake, and the transfer or reduction after it, for each collective.
- `point_to_point`: ``send`` and ``recv``.
"""
