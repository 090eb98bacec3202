"""BigBird's block-sparse attention, planned once and computed fast, each row by its own length."""
