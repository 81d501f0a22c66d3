"""fastload: a drop-in replacement for torch's DataLoader.

    sampler            workers                   window       collector          loop
    order = f(seed,    claim a run of samples,   bounded,     (a thread) takes   for x, y
    epoch), one part   read, transform, write    ordered      batches in order   in loader:
    per rank           into the batch's slot     hand-off     and pins them

The way of an index, folder by folder, from what a user holds to the batch:

    loader        DataLoader, which a training loop holds      settings: its arguments, checked
    order/        which samples come when
                  sampler: RankSampler, a rank's part of an epoch; partition: which part is a rank's; batches: of an
                  epoch, in order; lanes: those of an iterable dataset; order: what both are; epochs: which one runs,
                  and what was delivered; state: what is saved of both; sampler_state: what a sampler's indices
                  depend on
    engine/       runs an epoch
                  choice: threads or processes; iterator: the loop's side, fills the window and takes; readers: who
                  reads, what each owns, and what threads run; crew: processes that read; team: both, and how they
                  end; threads: what a thread has for itself; window: the bounded, ordered hand-off; waiting: lines of
                  threads; pinning: the collector's work; epoch_counts: stats, and who hears them; ranks: what the
                  ranks of a job hear of one another
    processes/    worker processes
                  starting: how they start; parent: one as the loop's process sees it; remote: the batches that it
                  was sent; child: what it and its readers run; work: what these share; beside: what it hears while they
                  read; jobs: what both say, over a wire; outcome: what comes of it; packing, packed_errors: batches
                  and errors as bytes; segments: the memory of batches, lent again; pausing: stops threads for a fork;
                  observed: what a process measures
    reading/      how a worker reads a batch
                  fetch: lets a source fill a run, reads what is missing, and finishes the batch, with what a worker
                  owns; sources: they make the batches, and read by `__getitem__` and `__getitems__`; filling: by
                  `fill_rows`; iterable: by an iterator; rows: who fills rows; failures: what an error becomes; runs:
                  what a worker claims at once, which the window asks; notices: warnings for the loop
    memory/       where a batch lies
                  ticket: a place in the order; batch: the ticket that carries samples; collate: samples become a batch;
                  layout: where a sample lies in it; slots: the memory, lent again; prefetch: copies batches to a
                  device ahead of the loop

What these stand on:

    random/       a random stream for each sample: streams, keys, and what routes torch, NumPy and `random` to them
    safety/       what each worker thread gets a copy of, and whether the user's code is thread-safe
    telemetry/    what threads measure, and the report
    rows          the protocol of a dataset that fills rows itself
    errors        fastload's own                               testing: fakes for tests of training loops
    _kit/         errors of user code, torch's private names, integers, hashing, nested containers, files, cores,
                  threads of commands

Plug-ins, which none of these imports:

    datasets, image         readers of files, and plans        check         which workers read a dataset?
    distributed             ranks that meet; submits jobs      elastic       leased shards
    store                   sets in shared memory              parameters    parameters on servers
    train, bench            the commands; both use measure     flow          commands as a graph
    stream                  prediction on messages             compat        other libraries' names
    accelerated             what Accelerate makes of a loader  integrations  frameworks without a hook
    sequences               mixtures, budgets, packing         streams       of shards, which resume exactly
    metrics                 figures for Prometheus             remote        objects of stores by URL
    cli                     the command `fastload`

`tests/rooms.py` has what each may import.
"""

from typing import TYPE_CHECKING, Any

# `errors` looks for it: the project `fastload` of PyPI has a module of that name.
__distribution__ = "torch-fastload"

from fastload import errors

if TYPE_CHECKING:
    from fastload.loader import DataLoader
    from fastload.memory.prefetch import prefetch_to
    from fastload.metrics import serve_metrics
    from fastload.order.sampler import RankSampler
    from fastload.random.streams import random_stream, sample_generator, sample_rng
    from fastload.reading.failures import SKIP
    from fastload.safety.libraries import threads_ok
    from fastload.stream import predict
    from fastload.telemetry import Stats, profiler_config, stage

    __version__: str

__all__ = [
    "SKIP",
    "DataLoader",
    "RankSampler",
    "Stats",
    "__version__",
    "errors",
    "predict",
    "prefetch_to",
    "profiler_config",
    "random_stream",
    "sample_generator",
    "sample_rng",
    "serve_metrics",
    "stage",
    "threads_ok",
]


def _first_use(name: str) -> Any:
    """Load a public name at its first use. Importing torch takes seconds, and `fastload flow` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import distributions

        ours = distributions(name=__distribution__)
        return next((found.version for found in ours), "0+unknown")
    if name == "predict":  # training loops do without
        from fastload.stream import predict

        return predict
    if name == "serve_metrics":
        from fastload.metrics import serve_metrics

        return serve_metrics
    if name == "prefetch_to":
        from fastload.memory.prefetch import prefetch_to

        return prefetch_to
    from fastload import loader, telemetry
    from fastload.order import sampler
    from fastload.random import streams
    from fastload.reading import failures
    from fastload.safety import libraries

    homes = (failures, libraries, loader, sampler, streams, telemetry)
    globals()[name] = found = next(vars(home)[name] for home in homes if name in vars(home))
    return found


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists
    __getattr__ = _first_use


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
