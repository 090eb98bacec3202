"""A model that stays in memory: predictions of what no file holds, requests gathered to batches, a JSON API over HTTP, a page
for a browser. Nothing here knows a kind of data.

May import: finetune.arguments, finetune.batching, finetune.errors, finetune.garbage_collection, finetune.kernels,
finetune.launching, finetune.plan, finetune.task.
"""
