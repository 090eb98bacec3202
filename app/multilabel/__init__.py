"""Multi-label classification: label columns, binary cross-entropy over them, the exported classifier."""
