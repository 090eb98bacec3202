"""Kernels: faster replacements for computations of torch and transformers, with the same meaning.

`enable.py` switches them on for a model; `--kernels reference` turns them off. The docstring of each kernel
(`bigbird`, `padding_free`, `dropout`, `embeddings`, `masks`, `threads`) states what it replaces, when it is
active and the measured gain. `compiling` implements --torch_compile. May import: samerun.errors.
"""
