"""The engine: knows no task and nothing of transformers. Modules import strictly lower levels."""
