"""Batches: the order of rows, their distribution over processes and micro-batches, collating, streaming,
packed masks.

Nothing here depends on the model.
"""
