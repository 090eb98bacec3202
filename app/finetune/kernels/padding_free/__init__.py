"""Encoders of the BERT family that compute on the tokens of a batch without its padding.

Replaces: the padded forward pass between the embeddings and what reads the last layer, and transformers' attention there.
Active: with --padding_free on, or auto on a GPU, for the models in `support.py`, in passes whose row lengths are known. On
a GPU by flash attention over rows of any length or jagged tensors, each after a self-test; else by one call per length.
Gain on a CPU: 1.36 times for MiniLM without length grouping (22% padding), 1.05 to 1.15 with it (5%;
docs/speed.md). Gain on a GPU: not yet measured.
May import: finetune.errors, finetune.kernels, finetune.kernels.dropout.
"""
