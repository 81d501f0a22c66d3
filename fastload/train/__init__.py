"""`fastload train`: a model on every rank, fed by the loader.

    recipe.py      what to train, as pure values
    data.py        the dataset and the loader
    models.py      the models: a small one of fastload's, or one of torchvision's
    learner.py     the model on its device, its optimiser, one step
    control.py     what ranks agree on: when to stop, what to sum up
    loop.py        `train` wires these; `fit` is the loop, which `measure.loop_timer` times
    tensorboard.py the folder of a run: its profile (profiling.py) and its scalars (scalars.py)
    checkpoint.py  model, optimiser, loader and random states in one file
    summary.py     the lines at the end, and the row of stats.csv (stats_file.py)

It never imports `bench`, nor `bench` it: what both need is in `measure`.
"""
