"""Serving: a predictor that stays in memory, dynamic batching, a JSON API over HTTP and a web page. Independent of the kind of
data.

May import: finetune.arguments, finetune.batching, finetune.errors, finetune.garbage_collection, finetune.kernels,
finetune.launching, finetune.plan, finetune.task.
"""
