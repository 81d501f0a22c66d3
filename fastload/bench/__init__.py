"""`fastload bench`: serial loading, threads and processes, raced on images.

    plan.py        what to run, as pure values: a workload, and the runs over it, in one or several ranks
    run.py         executes runs one after another: page cache, ranks, what else went on
    loop.py        one rank of a run, in a fresh process: N steps over one loader, figures out
    timeline.py    a short run in a fresh process, under torch's profiler: what each thread does
    figures.py     what runs yield, as pure values, and what several ranks yield together
    roofline.py    the most that a configuration could load
    report.py      outcomes to rows, rows to a table, all of it to JSON
    page/          that JSON as report.html
    plot.py        rows to a picture (matplotlib)

Data goes one way: `plan_runs` -> `execute` -> `summarise` -> table, JSON -> page. A sweep is a longer plan.
It never imports `train`, nor `train` it: what both need is in `measure`.
"""
