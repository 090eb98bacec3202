"""Kernels: faster replacements for computations of torch and transformers, with the same meaning.

`enable.py` switches them on for a model; `--kernels reference` turns them off. The docstring of each kernel
(`bigbird`, `padding_free`, `dropout`, `embeddings`) states what it replaces, when it is active and the
measured gain. On a GPU only BigBird's attention is replaced: kernels for GPUs that were never measured
(FlexAttention for BigBird, varlen and jagged attention without padding, masks that do not synchronise) are in
commit 7e83d99 and can be measured and brought back.
"""
