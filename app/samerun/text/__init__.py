"""Text tasks: what they share (files, tokens, batches), label columns, classifier heads, titles, tokenizers
and vocabularies. Image tasks need none of it.

May import: samerun.arguments, samerun.batching, samerun.errors, samerun.kernels, samerun.launching,
samerun.losses, samerun.metrics, samerun.models, samerun.output, samerun.plan, samerun.reading,
samerun.reports, samerun.task.
"""
