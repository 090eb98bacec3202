"""Rows: strict readers of files, tables of `datasets`, caches, batches and their order, streaming.

Nothing here depends on the model.
"""
