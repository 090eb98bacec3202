"""Parts of scripts/soak.py: the child process that dies at a disk call, and the comparison of two runs."""
