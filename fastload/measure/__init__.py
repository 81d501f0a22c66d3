"""Measuring code of `train` and `bench`. It imports neither.

options.py     options that both commands have
samples.py     the file list, and samples with their indices, so that delivered samples can be counted
loop_timer.py  times of a training loop on one rank: steps, waits, and averaging of gradients
averages.py    mean and deviation, quantiles
repeats.py     repeated runs: their turns, and the medians of their figures with their range
page_cache.py  reads files into the page cache, drops them from it, and measures how much of them is in it
fresh.py       runs a module in a new process: its start, end, memory and result
processes.py   CPU seconds and memory of a process and its descendants, from /proc
provenance.py  the machine, the versions, the commit and the command that gave figures
"""

WARMUP_STEPS = 5
"""Steps at the start of a run that no rate counts. Threads, processes, caches and allocators start in them."""
