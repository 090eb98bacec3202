"""What scripts/soak.py is made of: the child that dies when it is told to, and the comparison."""
