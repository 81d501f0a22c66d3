"""fastload: a threaded, drop-in replacement for torch's DataLoader.

    sampler            workers (threads)         window       collector          loop
    order = f(seed,    claim a run of samples,   bounded,     (a thread) takes   for x, y
    epoch), one part   read, transform, write    ordered      batches in order   in loader:
    per rank           into the batch's slot     hand-off     and pins them

Files are the pipeline: `sampler` (the order), `fetch` (a batch is read and finished), `collate` (from
samples to a batch, in slots), `window` (the hand-off; all locks), `workers` (all threads), `loader`
(wires these; epochs). They share `telemetry`, `errors` and `torch_private` (all that torch does not
promise). `testing` has fakes; `cli` is the command, the only file that imports folders. Folders are
plug-ins, which the files never import: `datasets`, `image`, `harness`.
"""

from fastload import errors
from fastload.fetch import SKIP
from fastload.loader import DataLoader
from fastload.sampler import RankSampler
from fastload.telemetry import Stats

__version__ = "0.1.0"

__all__ = ["SKIP", "DataLoader", "RankSampler", "Stats", "__version__", "errors"]
