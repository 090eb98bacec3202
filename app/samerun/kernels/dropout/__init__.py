"""Dropout on CPUs, of hidden states and attention weights. For a seed, the sample differs from torch's.

Replaces: `torch.nn.functional.dropout` in every `nn.Dropout`, and `scaled_dot_product_attention` with
dropout, for which torch has no fused kernel on a CPU. Active: in training on a CPU, in code that is not
compiled; attention if it is transformers' `sdpa`. Gain: a MiniLM's training pass is 1.47 times as fast
(docs/speed.md: median of 30 pairs, 185 to 486 tokens a row, two threads; 1.3 to 1.6 over several runs), and
with attention another 0.98 (rows of 20 tokens), 1.04 (180) and 1.6 times (500).
"""
