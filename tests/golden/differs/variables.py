"""Differences of variables."""

from __future__ import annotations

from .kinds import Differs, copies, f32, fails

_M = "variables_matrix/"
_WRITTEN = _M + "{AUTO|ON_WRITE}/"
VARIABLES = {
    "central_storage/var_type": Differs(
        "H1", "the names of two classes", lambda n: ("MirroredVariable", "MirroredVariable")
    ),
    "central_storage/assign_add_replica_NONE": Differs(
        "D6", "replicas may write the same without an aggregation", fails("LockstepError")
    ),
    _WRITTEN + "*/assign_cross_per_replica": Differs(
        "D6", "the copies differ there afterwards", fails("StructureError")
    ),
    _WRITTEN + "*/assign_cross_per_replica.components": Differs(
        "D6", "nothing was written", lambda n: [1.0] * n
    ),
    _WRITTEN + "NONE/assign_{|add_|sub_}replica_tensor{|@function}": Differs(
        "D6", "the copies differ there afterwards", fails("LockstepError")
    ),
    _WRITTEN + "NONE/assign_{|add_|sub_}replica_tensor{|@function}.components": Differs(
        "D6", "nothing was written", lambda n: [1.0] * n
    ),
    _WRITTEN + "*/read_replica_when_components_differ": Differs("D6", "they do not", copies(1.0)),
    _WRITTEN + "*/local_results": Differs(
        "D6", "no copy can be written alone", lambda n: [1.0] * n
    ),
    _WRITTEN + "*/all_reduce_var_in_replica": Differs(
        "D6", "n equal copies", lambda n: copies(n)(n)
    ),
    _WRITTEN + "SUM/assign_{replica_literal|replica_same_tensor_object}": Differs(
        "D4", "n times 6", lambda n: copies(6.0 * n)(n)
    ),
    _WRITTEN + "SUM/assign_{replica_literal|replica_same_tensor_object}.components": Differs(
        "D4", "n times 6", lambda n: [6.0 * n] * n
    ),
    _WRITTEN + "SUM/assign_add_replica_literal": Differs(
        "D4", "n times 6 more", lambda n: copies(1 + 6.0 * n)(n)
    ),
    _WRITTEN + "SUM/assign_add_replica_literal.components": Differs(
        "D4", "n times 6 more", lambda n: [1 + 6.0 * n] * n
    ),
    _M + "ON_READ/NONE/assign_cross_6": Differs(
        "H5", "written there too, then read, which fails", copies(6.0)
    ),
    _M + "ON_READ/NONE/assign_add_cross_6": Differs(
        "H5", "written there too, then read, which fails", copies(7.0)
    ),
    _M + "ON_READ/NONE/assign_sub_cross_6": Differs(
        "H5", "written there too, then read, which fails", copies(-5.0)
    ),
    "variables_creation/attrs": Differs(
        "H5",
        "copies have no names and devices to be told",
        lambda n: {
            "name": "named:0",
            "trainable": False,
            "dtype": "float32",
            "shape": [2],
            "sync": "VariableSynchronization.ON_WRITE",
            "agg": "VariableAggregation.NONE",
            "type": "MirroredVariable",
        },
    ),
    "variables_creation/handle_in_cross": Differs(
        "H1", "this replica's copy, as an array", lambda n: f32([3.0, 4.0])
    ),
    "variables_scatter/NONE_*": Differs(
        "D6", "the copies differ there afterwards", fails("LockstepError")
    ),
    "variables_created_unevenly/only_on_replica_0": Differs(
        "D11", "creation is a collective call", fails("LockstepError")
    ),
    "gradients_and_variables/tape_around_run_and_reduce": Differs(
        "H8", "None there, without a word", fails("ContextError")
    ),
}
