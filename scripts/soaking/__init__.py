"""What scripts/soak.py is made of: the child that dies at a given moment, and the comparison."""
