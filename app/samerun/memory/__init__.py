"""Memory estimate of a training step: state by arithmetic, activations by a dry run.

It covers any module and input, DDP, ZeRO with offload, FSDP, autocast and gradient checkpointing.
"""
