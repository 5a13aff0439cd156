"""What tf.distribute really returned, compared with what mpistrat returns; see README.md."""
