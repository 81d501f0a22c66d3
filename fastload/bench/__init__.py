"""`fastload bench`: compare serial loading, threads and processes on images.

    plan.py        what to run, as pure values: a workload, and the runs over it
    run.py         executes runs one after another: page cache, process, load of other processes
    loop.py        one rank of a run, in a new process: N steps over one loader
    figures.py     the outcome of a run, as pure values
    report.py      outcomes to rows, rows to a table, all of it to JSON
    plot.py        that JSON and the rows as one bar chart (matplotlib)
    page.py        that JSON, the table and the chart as one page, by the template page.html

Data goes one way: `plan_runs` -> `execute` -> `summarise` -> table, JSON, chart -> page. A sweep is a longer plan.
This package and `train` never import each other. What both need is in `measure`.
"""
