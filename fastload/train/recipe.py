"""The settings of a training run, as pure values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastload.errors import UsageError

LoaderName = Literal["thread", "process", "cached"]
"""thread: fastload's threads (none with 0 workers). process: torch's worker processes. cached: a few batches, loaded
once and repeated, to measure training without loading."""
TransformName = Literal["resize", "rrc"]
"""resize: Resize((size, size)). rrc: RandomResizedCrop(size) + flip. Both give uint8, normalised on the device."""
Precision = Literal["fp32", "tf32", "bf16"]


class TrainError(UsageError):
    """Raised if a training run cannot follow its arguments. The message names the argument and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of a training run, the same on all ranks. Raises `TrainError` if arguments exclude each other."""

    file_list: Path | None = None
    base_dir: Path | None = None
    packed: Path | None = None
    """Folder of a packed set, instead of a file list."""
    transform: TransformName = "resize"
    image_size: int | None = None
    """Pixels of both sides. None: 256 for "resize", 224 for "rrc"."""

    loader: LoaderName = "thread"
    workers: int = 1
    batch_size: int = 64
    """Batch size per rank. The global batch is this times `world_size`."""
    prefetch_batches: int = 2
    seed: int = 0

    steps: int | None = None
    """Total number of steps, with those before a resume. None: all of `epochs`, or 20."""
    epochs: int | None = None
    status_print_interval: int = 5
    step_ms: float = 0.0
    """Minimum time of a step in milliseconds, to simulate an accelerator. 0: no simulation."""

    model: str | None = None
    """None: "resnet50" on an accelerator, "tiny" without one."""
    weights: Path | None = None
    classes: int | None = None
    """Number of outputs of the model. None: the number of classes in the dataset."""
    lr: float = 0.001
    momentum: float = 0.9
    device: str = "auto"
    precision: Precision = "fp32"
    compile: bool = False
    channels_last: bool = False

    checkpoint: Path | None = None
    """Folder of the checkpoint. None: no checkpoint is written."""
    every: int | None = None
    """Steps between two checkpoints. None: one at the end, or when the run is stopped."""
    resume: bool = False

    logdir: Path = Path("logdir")
    profile: bool = False
    scalars: bool = False

    def __post_init__(self) -> None:
        if (self.file_list is None) == (self.packed is None):
            raise TrainError(
                "the training data must come from one source. Give either --file-list-path or --packed"
            )
        if self.packed is not None and self.base_dir is not None:
            raise TrainError(
                "--base-dir is for the paths of a list, and --packed has no list. Remove --base-dir"
            )
        if self.checkpoint is None and (self.every is not None or self.resume):
            which = "--every" if self.every is not None else "--resume"
            raise TrainError(f"{which} needs a folder for the checkpoint. Give --checkpoint DIR")
        if self.checkpoint is not None and self.loader == "cached":
            raise TrainError(
                "--loader cached cannot resume within an epoch. Use another --loader, or remove --checkpoint"
            )
        if self.loader == "process" and self.workers == 0:
            raise TrainError("--loader process needs --nworkers 1 or more")
        if self.weights is not None and self.resume:
            raise TrainError(
                "--weights starts a new training, and --resume continues one. Give only one of them"
            )

    @property
    def size(self) -> int:
        """Pixels of both sides of an image."""
        return self.image_size or (256 if self.transform == "resize" else 224)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps: the smaller limit of `steps` and `epochs`, or 20 if neither is given."""
        if self.epochs is None:
            return 20 if self.steps is None else self.steps
        whole = self.epochs * steps_per_epoch
        return whole if self.steps is None else min(whole, self.steps)
