"""Datasets, and each replica's examples of each step.

A `Dataset` is a description: it never communicates, and equal descriptions give equal elements on
every rank. A `DistributedDataset` divides it over the replicas of a strategy. The room promises
that every replica takes the same number of steps, that a step does not depend on the number of
replicas, and that each step is one handshake, which also shows that all ranks read the same data.
If an element cannot be read, its ``next()`` raises on all ranks; no error is mistaken for the end
of the data.

Begin with `dataset` and `distributed`; the modules between them are what these are made of, in the
order in which an element passes them.

- `sources`: arrays that are read by rows, streams of batches, files.
- `csv_files`: the columns of a CSV file as arrays.
- `pieces`: `LazyBatch`, a global batch that is not read yet; `Order`, a sequence of row numbers.
- `steps`: the transformations: shuffle, batch, map and so on.
- `filtered`: the transformation that keeps rows or batches by a predicate.
- `pipeline`: a source with its steps; the options of how a dataset is distributed.
- `dataset`: `Dataset`, the public description.
- `iterators`: iterators with the methods of ``tf.data``; reading ahead in one thread.
- `position`: the position in a dataset, as a checkpoint saves it.
- `sharding`: the ways to divide a dataset over replicas, without communication.
- `comparison`: rows, structures and dtypes, compared between ranks.
- `distributed`: every replica's part of each global batch.
"""
