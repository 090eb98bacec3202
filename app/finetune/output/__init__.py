"""What a run leaves on disk: its folder, files that are whole or absent, how it ended, and the versions that it is made of.
Also the thread that writes files while the run goes on.

May import: finetune.errors.
"""
