"""Text tasks: what they share (files, tokens, batches), label columns, classifier heads, titles, tokenizers and vocabularies.
Image tasks need none of it.

May import: finetune.arguments, finetune.batching, finetune.errors, finetune.kernels, finetune.launching, finetune.losses,
finetune.metrics, finetune.models, finetune.output, finetune.plan, finetune.reading, finetune.reports, finetune.task.
"""
