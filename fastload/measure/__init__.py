"""What `train` and `bench` measure with: ground of both, which imports neither.

samples.py     the file list, and each sample with its index, so that what was delivered can be counted
loop_timer.py  times the steps of a training loop, its waits and its gradients, on one rank
run_stats.py   the loader's `stats()` over a run: all epochs together, without the warm-up
averages.py    mean and deviation, quantiles
tables.py      medians of repeated runs with their range, and tables of text
page_cache.py  brings files into the page cache or drops them from it, and tells how much is in it
fresh.py       runs the ranks of a run in fresh processes: their start, their end, memory and results
processes.py   what /proc says about a process and its descendants: CPU seconds, memory
provenance.py  where figures come from: the machine, the versions, the commit, the command
"""

WARMUP_STEPS = 5
"""Steps at the start of a run that no rate counts: threads, processes, caches and allocators come up in them."""
