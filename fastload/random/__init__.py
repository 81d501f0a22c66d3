"""Random numbers that belong to the sample, whatever draws them.

- `streams` gives each sample and each batch a stream, and `keys` computes the streams' keys.
- `python_random`, `numpy_random` (with `numpy_memory`) and `torch_random` route the global random functions by thread.
- `held` keys the generators that a dataset holds. `global_states` saves and restores the global states, and `passes`
  says how far a pass over a stream has drawn.
"""
