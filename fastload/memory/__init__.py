"""The memory of batches: tickets, layouts, slots, collating."""
