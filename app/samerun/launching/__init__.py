"""Starts and ends a job of any number of processes: launch description, rendezvous, process group, DeepSpeed
and FSDP. It handles signals, detects lost processes by heartbeats, and turns every failure into one message
and an exit code.
"""
