"""fastload: a threaded, drop-in replacement for torch's DataLoader.

    sampler            workers (threads)         window       collector          loop
    order = f(seed,    claim a run of samples,   bounded,     (a thread) takes   for x, y
    epoch), one part   read, transform, write    ordered      batches in order   in loader:
    per rank           into the batch's slot     hand-off     and pins them

The way of an index, file by file:

    loader        DataLoader, which a training loop holds      settings: its arguments, checked
    epochs        which epoch runs, and what was delivered     state: what is saved of it
    iterator      the loop's side: fills the window, takes     reports: counts, warnings, `on_stats`
    sampler       RankSampler: a rank's part of an epoch       partition: which part is a rank's
    order         the batches of an epoch, in order            sampler_state: what a sampler's indices depend on
    batch         what travels
    window        the bounded, ordered hand-off                waiting: lines of threads
    run_length    how much a worker claims at once
    workers       starts and ends the threads                  worker_context: what each works with
    fetch         reads and finishes a batch                   choose_fetcher
    filling       lets the dataset fill rows of a batch        rows: how a dataset does so
    iterable      reads an iterable dataset                    read_ahead: in a second thread, for `max_wait_ms`
    collate       samples become a batch                       layout: how a sample lies in one
    slots         the memory of batches
    prefetch      copies batches to a device ahead of the loop

What all of these stand on:

    randomness    a random stream for each sample              stream_keys, global_draws, hashing
    isolation/    what each worker owns
    telemetry/    what threads measure, and the report         epoch_counts; notices: what the loop is to warn of
    user_errors   what user code raises                        errors: what fastload raises
    torch_private all that torch does not promise              cores, disk, fingerprint, nested (containers of tensors)
    evaluating    a model in eval mode, for a while

What they never import:

    datasets, image         readers of files, and plans        check         does a dataset suit threads
    store                   sets in shared memory              distributed   ranks that meet and average
    elastic                 leased shards                      parameters    parameters on servers
    train, bench            the commands; both use measure     flow          commands as a graph
    stream                  prediction on messages             compat        other libraries' names
    cli                     the command `fastload`             testing       fakes
"""

from typing import TYPE_CHECKING, Any

from fastload import errors

if TYPE_CHECKING:
    from fastload.fetch import SKIP
    from fastload.loader import DataLoader
    from fastload.prefetch import prefetch_to
    from fastload.randomness import random_stream, sample_generator, sample_rng
    from fastload.sampler import RankSampler
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
    "stage",
]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use. Torch takes seconds, and commands such as `fastload flow` do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import distributions

        return next((found.version for found in distributions(name="fastload")), "0+unknown")
    if name == "predict":  # training loops do without
        from fastload.stream import predict

        return predict
    from fastload import fetch, loader, prefetch, randomness, sampler, telemetry

    homes = (fetch, loader, prefetch, randomness, sampler, telemetry)
    globals()[name] = found = next(vars(home)[name] for home in homes if name in vars(home))
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
