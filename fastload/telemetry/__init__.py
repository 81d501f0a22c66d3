"""The measurements that threads take while a loader runs, and the report about them.

`recorder` has clocks, histograms, and the recorder that each thread writes to. `stages` names the parts of a sample,
for the recorder and for a torch profiler. `snapshot` has the figures of an epoch as values. `diagnosis` has the rules
that say what bounds a run, and `remote_waits` those for object stores, whose counts are in `remote_reads`. `stats`
prints both. `sums` adds up epochs, and `ranks` has what the ranks of a job say.
"""

from fastload.telemetry.ranks import Ranks, RankStats
from fastload.telemetry.recorder import (
    Place,
    Recorder,
    WaitClock,
    cores_busy_s,
    delayed_s,
    merge,
)
from fastload.telemetry.snapshot import RemoteReads, Stage
from fastload.telemetry.stages import (
    add_to_stage,
    profiler_config,
    recording,
    span,
    stage,
    waiting_span,
)
from fastload.telemetry.stats import Stats

__all__ = [
    "Place",
    "RankStats",
    "Ranks",
    "Recorder",
    "RemoteReads",
    "Stage",
    "Stats",
    "WaitClock",
    "add_to_stage",
    "cores_busy_s",
    "delayed_s",
    "merge",
    "profiler_config",
    "recording",
    "span",
    "stage",
    "waiting_span",
]
