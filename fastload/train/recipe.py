"""The settings of a training run, as pure values, which are the options of `fastload train`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastload._kit import options as opt
from fastload.errors import UsageError
from fastload.measure.options import ImageList, LoopOptions

LoaderName = Literal["auto", "thread", "process", "torch"]
TransformName = Literal["resize", "rrc"]
Precision = Literal["fp32", "tf32", "bf16"]


class TrainError(UsageError):
    """Raised if a training run cannot follow its arguments. The message names the argument and says what to do."""


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Where a model runs."""

    device: str = "auto"
    """Device of the model: auto, cpu, cuda or cuda:1. auto: an accelerator for each rank if there are any, else cpu."""


@dataclass(frozen=True, kw_only=True)
class Recipe(OnDevice, LoopOptions, ImageList):
    """The settings of a training run, the same on all ranks. Raises `TrainError` if arguments exclude each other."""

    packed: opt.ExistingFolder | None = None
    """Folder of a packed set (`fastload set pack`), instead of a list. Needs the extra `arrow`."""
    transform: TransformName = "resize"
    """Transform of the images. resize: resize to a square. rrc: RandomResizedCrop and flip. Batches are uint8, and the
    device normalises them."""
    image_size: Annotated[int | None, opt.Option(min=1, max=4096)] = None
    """Side of the square, in pixels. [default: 256, or 224 with --transform rrc]"""

    loader: LoaderName = "auto"
    """Loader of the samples. auto: the workers that fastload chooses. thread: its threads. process: its worker
    processes. torch: torch's own worker processes."""
    workers: Annotated[opt.Threads, opt.Option("-w --nworkers")] = 1
    """Workers per rank that load. 0: the training loop loads by itself."""
    prefetch_batches: Annotated[opt.Count, opt.Option("--cache-size")] = 2
    """Maximum number of batches that are read, or being read, ahead of the loop. torch: by each worker."""

    steps: Annotated[opt.Count | None, opt.Option("-s --nsteps")] = None
    """Total number of steps, including steps before a resume. [default: 20, or all of --epochs]"""
    epochs: opt.Count | None = None
    """Number of passes over the dataset. With -s, training ends at the smaller limit. [default: as many as --nsteps
    needs]"""

    model: str | None = None
    """Model: tiny, or a classification model of torchvision. [default: resnet50, or tiny without an accelerator]"""
    weights: opt.ExistingFile | None = None
    """File with the initial state_dict of the model. [default: random parameters]"""
    classes: opt.Count | None = None
    """Number of outputs of the model. [default: number of classes in the dataset]"""
    lr: opt.Amount = 0.001
    """Learning rate of SGD."""
    momentum: Annotated[opt.Amount, opt.Option(max=1)] = 0.9
    """Momentum of SGD."""
    seed: opt.Seed = 0
    """Seed of the order, the augmentation and the initial parameters."""
    precision: Precision = "fp32"
    """Precision for training. fp32: float32. tf32: float32 with faster, less exact matrix multiplication. bf16:
    autocast to bfloat16."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Use the channels-last memory format, which makes many convolutions faster."""

    checkpoint: Annotated[str, opt.Option(file_okay=False)] | os.PathLike[str] | None = None
    """Folder or URL for the checkpoint: model, optimiser, position in the data and random states. All ranks must see
    this folder. [default: no checkpoint]"""
    every: opt.Count | None = None
    """Steps between checkpoints. [default: one at the end, or when the run is stopped]"""
    resume: bool = False
    """Resume from the checkpoint if it exists. The number of ranks may differ, but not the global batch."""

    logdir: opt.Folder = Path("logdir")
    """Folder for the results: stats.csv with one row per run, and a folder DATE-TIME-workersN-ranksN for each run with
    --profile or --scalars."""
    profile: bool = False
    """Record torch's profiler on rank 0 into the run's folder in --logdir: 10 steps, after 5 skipped steps and 1
    warm-up step."""
    metrics_port: opt.Port | None = None
    """Serve metrics for Prometheus to this machine, at this port for the first rank of a node, and the next ones for
    its others. Needs the extra `prometheus`. [default: none]"""
    scalars: bool = False
    """Write TensorBoard scalars into the run's folder in --logdir. Needs the extra `tensorboard`."""

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
        if self.checkpoint is not None and self.loader == "torch":
            raise TrainError(
                "--loader torch cannot resume within an epoch. Use another --loader, or remove --checkpoint"
            )
        if self.loader in ("process", "torch") and self.workers == 0:
            raise TrainError(f"--loader {self.loader} needs --nworkers 1 or more")
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
