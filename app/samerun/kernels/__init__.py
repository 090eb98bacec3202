"""Kernels: faster replacements for computations of torch and transformers, with the same meaning.

The docstrings of `bigbird`, `dropout`, `last_layer` and `products` state what each replaces, when it is
active and the measured gain. `--attn_implementation eager` turns the last layer's off, `--dropout_by torch`
dropout, OPENBLAS_CORETYPE=HASWELL in the environment OpenBLAS's products. BigBird's is always on: with
transformers' own a document's result depends on the padding of its batch, and one batch of at most 5 + 2 r
blocks switches the model to full attention for the rest of the run (transformers issue 20031).

On a GPU BigBird's attention is replaced, and transformers' question whether a batch has padding (`masks`):
kernels for GPUs that were never measured (FlexAttention for BigBird, varlen and jagged attention without
padding) are in commit 7e83d99 and can be measured and brought back.
"""

import contextlib


def is_zen5() -> bool:
    """Whether the first CPU is of AMD's family 26; False where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return any(line.split(":")[-1].strip() == "26" for line in file if line.startswith("cpu family"))
    return False
