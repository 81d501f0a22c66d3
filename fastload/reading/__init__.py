"""How a worker reads a batch: sample by sample, in one call, or from an iterator."""
