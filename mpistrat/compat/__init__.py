"""Names of other libraries, so that programs written for them run.

- `tf`: the few ``tf.*`` names that code for tf.distribute without models needs.
"""
