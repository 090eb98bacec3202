"""Parts of scripts/bench.py: contenders in processes that take turns, clock and memory, sections, reports."""
