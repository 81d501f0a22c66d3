"""`fastload train`: train a model on every rank with fastload's loader.

    recipe.py      what to train, as pure values
    data.py        the dataset and the loader
    models.py      the models: fastload's own small one, or one of torchvision's
    devices.py     the device of a rank
    learner.py     the model on its device, its optimiser, one step
    control.py     how a signal stops all ranks after the same step
    loop.py        `train` connects these; `fit` is the loop, which `measure.loop_timer` times
    tensorboard.py the folder of a run: its profile (profiling.py) and its scalars
    checkpoint.py  model, optimiser, loader and random states in one file
    summary.py     the lines at the end, and the row of stats.csv (stats_file.py)

This package and `bench` never import each other. What both need is in `measure`.
"""
