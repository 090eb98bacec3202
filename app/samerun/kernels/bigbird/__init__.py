"""BigBird's block-sparse attention, row by row, by gathered blocks; and a fused gelu_new.

Replaces: the block-sparse attention of transformers' BigBird and BigBirdPegasus encoders, and their
activation gelu_new. Unlike transformers' own, a row's result does not depend on other rows, and a narrow
batch does not switch the encoder to full attention for the rest of the run. Active: in encoders whose
attention type is block_sparse. Gain on a CPU: at 4096 tokens the attention alone is 5.36 and a layer 2.48
times as fast as transformers', a layer at 1536 tokens 1.49 times (benchmarks/goals.md, "BigBird"). gelu_new
of 2048 x 3072 numbers, forward and backward, 3.8 times (CPU time on one thread of a busy machine). On a GPU
the same operations run, for the same results; their speed there was not measured.
"""
