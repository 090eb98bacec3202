"""Batches: the order of rows, their distribution over processes and micro-batches, collating, streaming.

The model is not known here.

May import: finetune.errors, finetune.launching, finetune.plan, finetune.task.
"""
