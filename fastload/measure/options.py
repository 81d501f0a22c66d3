"""Options that `fastload train` and `fastload bench` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fastload._kit.options import Count, Index, Milliseconds, Option

CacheState = Literal["warm", "cold"]


@dataclass(frozen=True, kw_only=True)
class ImageList:
    """A list of images."""

    file_list: Annotated[str | None, Option("--file-list-path --file-list", dir_okay=False)] = None
    """Text file with the path of one image per line. The class of an image is the name of its folder. A relative path
    is searched in the current folder, then in --base-dir."""
    base_dir: Annotated[str | None, Option(exists=True, file_okay=False)] = None
    """Folder that relative paths in the list start from. [default: folder of the list]"""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """A loop over batches."""

    batch_size: Annotated[Count, Option("-b --nbatch")] = 64
    """Batch size. With several ranks, that of each."""
    status_print_interval: Count = 5
    """Steps between two lines with the rate."""
    step_ms: Milliseconds = 0.0
    """Simulated accelerator: minimum time of a step, in milliseconds. 0: the loop only loads."""
    seed: Index = 0
    """Seed of the order of the samples."""
