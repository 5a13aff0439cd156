"""The decisions by which results differ from the record, and what differs by which.

D1 to D22 are decisions about the whole interface; H1 to H9 are habits of this library.
"""

from __future__ import annotations

from .differs import DIFFERS, Differs, Fails, Ranks

__all__ = ["DECISIONS", "DIFFERS", "WRAPPED", "Differs", "Fails", "Ranks"]

DECISIONS = {
    "D1": "merge_fn runs on every rank, each with the closure of its own replica",
    "D2": "every returned leaf but None, variables and mirrored values is wrapped, at every number "
    "of replicas: object identity cannot be seen across processes; but text, bytes and bools that "
    "are equal on all replicas reach merge_fn as they are",
    "D3": "a plain value has no SUM over replicas, at every number of them; trees are allowed",
    "D4": "a literal written by n replicas with SUM counts n times",
    "D6": "the copies of an ON_WRITE variable cannot be made to differ",
    "D8": "all number types; dtypes are kept; a MEAN of integers is floating and never wraps; MAX "
    "and MIN of bool are any and all",
    "D9": "MIN, MAX and PROD are operations too, and of bool ANY and ALL",
    "D11": "a difference between ranks is a LockstepError on all of them",
    "D12": "a failing rank raises its own error, the others one of the same built-in class",
    "D13": "gathers take negative axes and parts that are all empty, and nothing without axes",
    "D14": "HINT is DATA",
    "D17": "accidents of the recorded implementation are not copied",
    "D18": "an unbatched dataset is taken as if batched by the number of replicas",
    "D19": "device names are labels; the launcher says how many replicas there are",
    "D22": "with several ranks and no strategy in scope, replica code may not communicate",
    "H1": "tensors are NumPy arrays, the replica id is an integer, classes have names of their own",
    "H2": "a Python number is a value like any other; an empty tree is a tree",
    "H3": "replicas are processes that run at the same time, each with its own closures",
    "H4": "tf.function is the identity",
    "H5": "a write gives the variable back and reads nothing; copies have no names of their own",
    "H6": "results for a device label are plain, in a batch too",
    "H7": "a text that nothing has set is empty",
    "H8": "nothing is recorded: gradients are asked for in replica code, and elsewhere refused",
    "H9": "what well-known older programs call is there, though the newest reference dropped it",
}


# What differs by D2 alone: a plain value is recorded, and ours is a `PerReplica` of n such values.
WRAPPED = (
    "run_basic/args_{list_ok|numpy}",
    "run_return_identity_rule/{small_int|literal_str|literal_float_same_code_object}",
    "run_return_identity_rule/{shared_tensor|bool|fn_returns_arg_plain|fn_returns_arg_list}",
    "run_nests/namedtuple",
    "run_errors/reduce_inside_merge_fn",
    "merge_call_args/{args|kwargs}_seen",
    "variables_creation/read_value_in_merge_fn",
    "v1_strategy/ctx_type_has_all_gather",
    "scopes/replica_ctx_attrs",
    "one_device_strategy/mirrored1_{run|all_reduce|merge_arg|dataset}",
)
