"""Worker processes: how they start, read batches into shared memory, and end."""
