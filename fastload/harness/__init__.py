"""Measuring and training: the main job of fastload, outside the pipeline.

    plan.py       what to run, as pure values: a workload, and the runs over it
    measure.py    one run, in a fresh process of its own: N steps over one loader, figures out
    bench.py      executes runs one after another: page cache, child process, peak memory
    processes.py  what /proc says about a process and its descendants
    report.py     outcomes to rows, table and JSON with provenance
    plot.py       rows to a picture (matplotlib)

Data goes one way: `plan_runs` -> `execute` -> `summarise` -> table, JSON, plot. A sweep is a longer plan.
`train.py` is the other half: a model on every rank, fed by the loader; it lists the files that it is made of.
"""
