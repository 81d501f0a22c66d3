"""Runs an epoch: the window, the threads, and the loop's side of both."""
