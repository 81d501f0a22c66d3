"""fastload: a threaded, drop-in replacement for torch's DataLoader.

    sampler            workers (threads)                    window            collector
    loop order = f(seed,    claim a run of the order,            bounded,          (a thread) takes
    for x, y in epoch), one part   read -> decode -> transform,         ordered           batches in
    order,    loader: per rank           write into the batch's slot          hand-off          pins
    them

Files are the pipeline: `sampler` (the order), `fetch` (one batch read and finished), `collate`
(samples into slots), `window` (the hand-off; all locks), `workers` (all threads), `loader` (wires
the above). `telemetry` and `errors` are shared by the stages. Folders are plug-ins that the files
never import: `datasets`, `image`, `harness`.
"""

from fastload import errors
from fastload.fetch import SKIP
from fastload.loader import DataLoader
from fastload.sampler import RankSampler
from fastload.telemetry import Stats

__version__ = "0.1.0"

__all__ = ["SKIP", "DataLoader", "RankSampler", "Stats", "__version__", "errors"]
