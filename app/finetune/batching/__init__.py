"""Which rows each process computes with at each step, and the batches of them: order, shares of processes, collating, rows that
are streamed. It computes nothing.

May import: finetune.errors, finetune.launching, finetune.plan, finetune.task.
"""
