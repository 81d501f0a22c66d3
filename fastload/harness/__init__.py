"""Measuring and training: the main job of fastload, outside the pipeline.

    plan.py       what to run, as pure values: a workload, and the runs over it, in one or several ranks
    ranks.py      starts the ranks of a run as processes, together, and watches them
    measure.py    one rank of a run, in a process of its own: N steps over one loader, figures out
    timeline.py   a short run in a process of its own, under torch's profiler: what each thread does
    bench.py      executes runs one after another: page cache, ranks, what else went on
    page_cache.py the state of the page cache before a run
    processes.py  what /proc says about a process and its descendants
    steady.py     the loader's figures over a run, without the warm-up
    figures.py    what runs yield, as pure values, and what several ranks yield together
    roofline.py   the most that a configuration could load
    report.py     outcomes to rows, rows to a table, all of it to JSON
    provenance.py the machine, the versions, the commit, the command
    sheet.py      that JSON as CSV
    page.py       that JSON as report.html: of panels.py (pictures by charts.py), tables.py, markup.py and page.css
    plot.py       rows to a picture (matplotlib)

Data goes one way: `plan_runs` -> `execute` -> `summarise` -> table, JSON -> CSV, page. A sweep is a longer plan.
`train.py` is the other half: a model on every rank, fed by the loader; it lists the files that it is made of.
"""
