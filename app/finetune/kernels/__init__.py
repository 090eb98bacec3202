"""Faster computation, and nothing else: a kernel replaces a computation of torch or transformers by one that means the same.
`enable.py` is the only entry for models; `--kernels reference` turns every kernel off.

The package is finetune.kernels and not a package of its own: as `kernels` it would hide Hugging Face's distribution of that
name, which transformers imports. Each kernel's module or package says what it replaces, when it is active and what it
gains: `bigbird`, `padding_free`, `dropout`, `embeddings`, `masks`, and `threads`, which serves others.
`compiling` is no kernel of ours but --torch_compile, off unless requested.
May import: finetune.errors.
"""
