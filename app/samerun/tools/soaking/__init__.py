"""Parts of `samerun soak`: the child process that dies at a disk call, and the comparison of two runs."""
