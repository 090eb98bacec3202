"""What the benchmarks share: contenders in processes of their own that take turns, one clock for all, reports."""
