"""What users run beside a training: `samerun plan`, `samerun parity` and the others, one module each. The
packages are their parts. Neither the engine nor a task imports them."""
