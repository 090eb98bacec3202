"""How a job starts and ends on any number of processes: the launch, the rendezvous of machines, the process group, DeepSpeed.
It receives signals, finds lost processes by their heartbeats, and turns every failure into one message and an exit code.

May import: finetune.errors, finetune.output, finetune.plan, finetune.reading.
"""
