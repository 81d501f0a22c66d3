"""What all rooms stand on, and what knows nothing of loading."""
