"""Models of transformers: found, loaded and checked, given decoders, exported as plain Hugging Face folders; losses of
segmentation. Nothing here trains.

May import: finetune.errors, finetune.output, finetune.reading.
"""
