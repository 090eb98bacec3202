"""Encoders of the BERT family without computation on padding.

Replaces: the padded forward pass between the embeddings and the last layer, and transformers' attention
there, by one call per row length. Active: with --padding_free on a CPU, for the models in `support.py`, in
passes with known row lengths. Gain: 1.36 times for MiniLM without length grouping (22% padding), 1.05 to 1.15
with it (5%; docs/speed.md).
"""
