"""The engine: knows no task and nothing of transformers. Modules import strictly lower levels (see tests/test_architecture.py)."""
