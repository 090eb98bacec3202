"""A part of `samerun soak` and of the tests of faults: the comparison of two runs."""
