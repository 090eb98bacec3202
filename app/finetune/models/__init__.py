"""Models of transformers: found, loaded and checked, given decoders, exported as plain Hugging Face folders; what
their inputs contributed; temperatures of logits. Nothing here trains.

May import: finetune.errors, finetune.kernels, finetune.metrics, finetune.output, finetune.reading.
"""
