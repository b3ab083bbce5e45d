"""Text as tokens, and tokens as batches."""
