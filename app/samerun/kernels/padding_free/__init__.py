"""Encoders of the BERT family without computation on padding.

Replaces: the padded forward pass between the embeddings and the last layer, and transformers' attention
there. Active: with --padding_free on, or auto on a GPU, for the models in `support.py`, in passes with known
row lengths. On a GPU attention uses varlen flash attention or jagged tensors, each after a self-test;
otherwise one call per row length. Gain on a CPU: 1.36 times for MiniLM without length grouping (22% padding),
1.05 to 1.15 with it (5%; docs/speed.md). Gain on a GPU: not yet measured. May import: samerun.errors,
samerun.kernels, samerun.kernels.dropout.
"""
