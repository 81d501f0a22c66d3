"""What to train, on what, and for how long, as pure values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastload.errors import UsageError

LoaderName = Literal["thread", "process", "cached"]
"""thread: fastload's threads (none with 0 workers). process: torch's worker processes. cached: loads a few batches,
then gives them again and again: what training costs without loading."""
TransformName = Literal["resize", "rrc"]
"""resize: Resize((size, size)). rrc: RandomResizedCrop(size) + flip. Both uint8, normalised on the device."""
Precision = Literal["fp32", "tf32", "bf16"]


class TrainError(UsageError):
    """A training run cannot be done as asked; the message names the argument and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run: every rank has the same one. Raises `TrainError` for arguments that exclude each other."""

    file_list: Path | None = None
    base_dir: Path | None = None
    packed: Path | None = None
    """A packed set, in place of a file list."""
    transform: TransformName = "resize"
    image_size: int | None = None
    """Pixels of both sides; None: 256 for "resize", 224 for "rrc"."""

    loader: LoaderName = "thread"
    workers: int = 1
    batch_size: int = 64
    """Samples in a batch of one rank: all ranks together take `world_size` times as many in a step."""
    prefetch_batches: int = 2
    seed: int = 0

    steps: int | None = None
    """Steps of the training, those before a checkpoint included; None: all of `epochs`, or 20."""
    epochs: int | None = None
    status_print_interval: int = 5
    step_ms: float = 0.0
    """What a step lasts at least: a simulated accelerator. 0: nothing is simulated."""

    model: str | None = None
    """None: "resnet50" on an accelerator, "tiny" without one."""
    weights: Path | None = None
    classes: int | None = None
    """Outputs of the model; None: as many as the dataset has classes."""
    lr: float = 0.001
    momentum: float = 0.9
    device: str = "auto"
    precision: Precision = "fp32"
    compile: bool = False
    channels_last: bool = False

    checkpoint: Path | None = None
    """Folder of the checkpoint; None: none is written."""
    every: int | None = None
    """Steps between two checkpoints; None: at the end alone, also when the run is stopped."""
    resume: bool = False

    logdir: Path = Path("logdir")
    profile: bool = False
    scalars: bool = False

    def __post_init__(self) -> None:
        if (self.file_list is None) == (self.packed is None):
            raise TrainError("give --file-list-path or --packed: one of them says what to train on")
        if self.packed is not None and self.base_dir is not None:
            raise TrainError(
                "--base-dir is where the paths of a list begin: a packed set has no use for it"
            )
        if self.checkpoint is None and (self.every is not None or self.resume):
            which = "--every" if self.every is not None else "--resume"
            raise TrainError(f"{which} needs --checkpoint DIR, where the checkpoint lies")
        if self.checkpoint is not None and self.loader != "thread":
            raise TrainError(
                f"--checkpoint needs --loader thread: --loader {self.loader} keeps no place in an epoch"
            )
        if self.loader == "process" and self.workers == 0:
            raise TrainError("--loader process needs --nworkers 1 or more")
        if self.weights is not None and self.resume:
            raise TrainError("--weights begins a training, --resume goes on with one: give either")

    @property
    def size(self) -> int:
        """Pixels of both sides of a picture."""
        return self.image_size or (256 if self.transform == "resize" else 224)

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps the training has: whichever of `steps` and `epochs` ends first; 20 where neither is given."""
        if self.epochs is None:
            return 20 if self.steps is None else self.steps
        whole = self.epochs * steps_per_epoch
        return whole if self.steps is None else min(whole, self.steps)
