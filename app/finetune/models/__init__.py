"""Models of transformers: found, loaded and checked, given decoders, exported as plain Hugging Face folders; losses of
segmentation and of multi-label classification, temperatures of logits. Nothing here trains.

May import: finetune.errors, finetune.kernels, finetune.metrics, finetune.output, finetune.reading.
"""
