"""What a training loop measures of itself, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastload.measure import WARMUP_STEPS
from fastload.measure.averages import Quantiles
from fastload.measure.processes import cpu_seconds
from fastload.measure.run_stats import RunStats
from fastload.telemetry import Stats

QUANTILES = (50.0, 95.0, 99.0)
_CPU = torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; nothing on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Laps:
    """Seconds between pairs of places in a program, on the device's own clock where the device is none of the CPU's.

    There the host runs ahead of the device: the places are events in its stream, and their times are known
    once the device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._pending: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """A place: now, or where the device's current stream will be."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begin: Any, end: Any) -> None:
        """A lap from one place to another."""
        self._pending.append((begin, end))

    def settle(self) -> list[float]:
        """The seconds of the laps added since the last call; on a device, call it behind `synchronize`."""
        pending, self._pending = self._pending, []
        if self._module is None:
            return [end - begin for begin, end in pending]
        return [begin.elapsed_time(end) / 1000 for begin, end in pending]


class GradientTraffic:
    """Seconds in which gradients of a DDP model were being averaged: of each step, from the first bucket handed over
    until the last one is there. Much of it lies beside the backward pass and costs the step nothing.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._laps = Laps(device)
        self._begin: Any = None
        self._ends: list[Any] = []
        self._world_size = dist.get_world_size(model.process_group)

        # Torch compares a hook's annotations as objects, and ours are strings: one that has none passes.
        def hook(group, bucket):  # type: ignore[no-untyped-def]
            return self._average(group, bucket)

        model.register_comm_hook(model.process_group, hook)

    def _average(self, group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's own averaging of a bucket of gradients, with a look at the clock before and after."""
        if self._begin is None:
            self._begin = self._laps.mark()
        gradients = bucket.buffer().div_(self._world_size)
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None

        def averaged(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._ends.append(self._laps.mark())
            return future.value()[0]

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(averaged)
        return done

    def step_done(self) -> None:
        """Behind each backward pass: the step's traffic is over."""
        if self._begin is not None and self._ends:
            self._laps.add(self._begin, self._ends[-1])
        self._begin, self._ends = None, []

    def settle(self) -> float:
        """The seconds of the steps since the last call; on a device, call it behind `synchronize`."""
        return sum(self._laps.settle())


@dataclass(kw_only=True)
class Measured:
    """What one rank measured. "Steady" is from the end of the warm-up to the end of the last step."""

    steps: int = 0
    samples: int = 0
    window_rates: list[float] = field(default_factory=list)
    """Samples a second of each window that ended after the warm-up, as the tutorial has them."""
    training_s: float = 0.0
    """From the loader's `iter()` to the end of the last step, warm-up included."""
    steady_from: float = 0.0
    """`time.monotonic()`, which is one clock for all processes of a machine."""
    steady_to: float = 0.0
    steady_samples: int = 0
    steady_cpu_s: float | None = None
    """CPU seconds (user + system, children included); None if they are not known."""
    waited_s: float = 0.0
    """Steady seconds in which the loop waited for a batch."""
    first_batch_s: float = 0.0
    communication_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoints: int = 0
    step: Quantiles = field(default_factory=Quantiles)
    """Seconds of each steady step, from the batch in hand to the parameters changed."""
    wait: Quantiles = field(default_factory=Quantiles)
    """Seconds of each steady wait for a batch."""
    overran: int = 0
    """Steps that took longer by themselves than the simulated step shall."""
    ahead: list[float] = field(default_factory=list)
    """Batches read ahead as step 1 began, as the warm-up ended, and at the end."""
    stats: Stats | None = None
    """The loader's, steady: of all epochs together. Of a run that ended in the warm-up, all of it."""

    @property
    def steady_s(self) -> float:
        """Seconds of steady running; 0 if the run ended in the warm-up."""
        return self.steady_to - self.steady_from

    @property
    def rate(self) -> float | None:
        """Samples a second, steady; None if the run ended in the warm-up."""
        return self.steady_samples / self.steady_s if self.steady_s else None

    @property
    def wait_share(self) -> float | None:
        """Share (0 to 1) of the steady seconds in which the loop waited for the loader."""
        return self.waited_s / self.steady_s if self.steady_s else None


class Meter:
    """The clock of a training loop: tells it the windows' rates, and at the end what was `measured`.

    Args:
        stats: the loader's `stats`; None if it has none.
        step_ms: milliseconds that each step lasts at least, as if an accelerator computed while the host waits.
        device: where steps run. It is waited for at the end of each window, as a rate is of work that is done.
        traffic: of the gradients; None with one rank.
    """

    def __init__(
        self,
        stats: Callable[[], Stats] | None,
        *,
        step_ms: float = 0.0,
        device: torch.device = _CPU,
        traffic: GradientTraffic | None = None,
    ) -> None:
        self.measured = Measured()
        self._step_s = step_ms / 1000
        self._device = device
        self._stats = stats
        self._run_stats = None if stats is None else RunStats(stats)
        self._traffic = traffic
        self._laps = Laps(device)
        self._begin = self._window_begin = time.monotonic()
        self._window_samples = 0
        self._warm_cpu_s: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the loop's wait for a batch."""
        before = time.monotonic()
        yield
        now = time.monotonic()
        measured, waited_s = self.measured, now - before
        if measured.steps == 0:
            measured.first_batch_s = now - self._begin
            self._look_ahead()
        elif measured.steps >= WARMUP_STEPS:
            measured.waited_s += waited_s
            measured.wait.add(waited_s)

    @contextmanager
    def stepping(self, samples: int) -> Iterator[None]:
        """Around a step on `samples` samples."""
        begin, until = self._laps.mark(), time.monotonic() + self._step_s
        yield
        measured = self.measured
        if self._step_s:
            left_s = until - time.monotonic()
            measured.overran += left_s < 0
            time.sleep(max(0.0, left_s))
        self._laps.add(begin, self._laps.mark())
        if self._traffic is not None:
            self._traffic.step_done()
        measured.steps += 1
        measured.samples += samples
        self._window_samples += samples
        if measured.steps > WARMUP_STEPS:
            measured.steady_samples += samples
        elif measured.steps == WARMUP_STEPS:
            self._settle()
            self._look_ahead()
            if self._run_stats is not None:
                self._run_stats.begin()
            self._warm_cpu_s = cpu_seconds()
            measured.steady_from = measured.steady_to = time.monotonic()

    def epoch_ended(self) -> None:
        """Record the figures of an epoch. Call it after its last batch, before the next epoch begins."""
        if self._run_stats is not None:
            self._run_stats.epoch_ended()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        before = time.monotonic()
        yield
        self.measured.checkpoint_s += time.monotonic() - before
        self.measured.checkpoints += 1

    def window(self) -> float:
        """End a window of steps: its rate, in samples a second."""
        self._settle()
        now = time.monotonic()
        rate = self._window_samples / (now - self._window_begin)
        self._window_begin, self._window_samples = now, 0
        if self.measured.steps > WARMUP_STEPS:
            self.measured.window_rates.append(rate)
        return rate

    def end(self) -> Measured:
        """Return what was measured. Call it after the last step."""
        self._settle()
        now, cpu_s = time.monotonic(), cpu_seconds()
        measured = self.measured
        measured.training_s = now - self._begin
        if measured.steps > WARMUP_STEPS:
            measured.steady_to = now
            if cpu_s is not None and self._warm_cpu_s is not None:
                measured.steady_cpu_s = cpu_s - self._warm_cpu_s
        self._look_ahead()
        measured.stats = None if self._run_stats is None else self._run_stats.now()
        return measured

    def _settle(self) -> None:
        synchronize(self._device)
        steps_s = self._laps.settle()
        # Warm-up steps are settled as the last of them ends, before any other step.
        if self.measured.steps > WARMUP_STEPS:
            for seconds in steps_s:
                self.measured.step.add(seconds)
        if self._traffic is not None:
            self.measured.communication_s += self._traffic.settle()

    def _look_ahead(self) -> None:
        """Note how many batches' worth of samples the loader has read, and not handed out."""
        stats = None if self._stats is None else self._stats()
        sample = None if stats is None else stats.stages.get("sample")
        if stats is not None and sample is not None and stats.batches:
            ahead = max(0, sample.count - stats.samples - stats.errors)
            self.measured.ahead.append(ahead * stats.batches / max(1, stats.samples))
