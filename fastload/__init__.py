"""fastload: a threaded, drop-in replacement for torch's DataLoader.

    sampler            workers (threads)         window       collector          loop
    order = f(seed,    claim a run of samples,   bounded,     (a thread) takes   for x, y
    epoch), one part   read, transform, write    ordered      batches in order   in loader:
    per rank           into the batch's slot     hand-off     and pins them

Files are the pipeline: `sampler` (the order), `randomness` (a stream for each sample), `batch` (what
travels), `fetch` (a batch is read and finished; `lanes`: of an iterable data set), `collate` (from samples
to a batch, in the memory of `slots`, which by `rows` a dataset may fill), `window` (the hand-off; all locks), `workers`
(all threads), `order` (what is next, and what the loop has had; `draws`: what a sampler draws from;
`state`: what a loader saves, and whether it fits), `iterator` (the loop's side of an epoch), `loader` (wires these),
`prefetch` (puts the batches on a device). They share `telemetry` (what threads
measure, and the report of it; `tally` counts an epoch), `isolation` (what each worker owns), `faults`
(what user code raises), `errors` and `torch_private` (all that torch does not promise).
`testing` has fakes. Folders are plug-ins, which the files never import: `datasets`, `image`, `check` (does a dataset
suit threads), `distributed`, `measure` (what `train` and `bench` stand on), and `cli`, the command.
"""

from fastload import errors
from fastload.fetch import SKIP
from fastload.loader import DataLoader
from fastload.prefetch import prefetch_to
from fastload.randomness import random_stream, sample_generator, sample_rng
from fastload.sampler import RankSampler
from fastload.telemetry import Stats, profiler_config, stage

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "DataLoader",
    "RankSampler",
    "Stats",
    "__version__",
    "errors",
    "prefetch_to",
    "profiler_config",
    "random_stream",
    "sample_generator",
    "sample_rng",
    "stage",
]
