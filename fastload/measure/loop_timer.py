"""The timer of a training loop on one rank."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastload.measure import WARMUP_STEPS
from fastload.measure.processes import cpu_seconds
from fastload.telemetry import Stats
from fastload.telemetry.sums import less

_CPU = torch.device("cpu")


class Laps:
    """Seconds between pairs of marks in a program, on the clock of the device.

    The host runs ahead of an accelerator. So marks are events in its stream, and their times are known after the
    device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._pending: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Return a mark: the time now, or an event in the current stream of the device."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begin: Any, end: Any) -> None:
        """Add a lap from one mark to another."""
        self._pending.append((begin, end))

    def settle(self) -> list[float]:
        """Return the seconds of the laps added since the last call, after the device has finished all its work."""
        pending, self._pending = self._pending, []
        if self._module is None:
            return [end - begin for begin, end in pending]
        self._module.synchronize(self._device)
        return [begin.elapsed_time(end) / 1000 for begin, end in pending]


class GradientTraffic:
    """Seconds per step of averaging gradients of a DDP model, from the first bucket's start to the last bucket's end.

    Much of it overlaps with the backward pass and does not make the step longer.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._laps = Laps(device)
        self._begin: Any = None
        self._ends: list[Any] = []
        self._world_size = dist.get_world_size(model.process_group)
        model.register_comm_hook(model.process_group, self._average)

    # Torch compares the annotations of a hook as objects, but ours are strings. A hook without annotations passes.
    def _average(self, group, bucket):  # type: ignore[no-untyped-def]
        """Average a bucket of gradients as DDP does, and time it. Return its future."""
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
        """End the traffic of a step. Call this after each backward pass."""
        if self._begin is not None and self._ends:
            self._laps.add(self._begin, self._ends[-1])
        self._begin, self._ends = None, []

    def settle(self) -> float:
        """Return the seconds of the steps since the last call, after the device has finished them."""
        return sum(self._laps.settle())


@dataclass(kw_only=True)
class Measured:
    """The measurements of one rank. "Steady" is the time from the end of the warm-up to the end of the last step."""

    steps: int = 0
    samples: int = 0
    window_rates: list[float] = field(default_factory=list)
    """Samples per second of each window that ended after the warm-up, as in the tutorial."""
    training_s: float = 0.0
    """Seconds from the loader's `iter()` to the end of the last step, with the warm-up."""
    steady_s: float = 0.0
    """Seconds of steady running, or 0 if the run ended in the warm-up."""
    steady_samples: int = 0
    steady_cpu_s: float | None = None
    """CPU seconds (user + system, with children), or None if unknown."""
    first_batch_s: float = 0.0
    communication_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoints: int = 0
    step: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each steady step, from the batch to the changed parameters."""
    wait: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each steady wait for a batch."""
    stats: Stats | None = None
    """Steady stats of the loader, over all epochs. If the run ended in the warm-up, they cover all of it."""

    @property
    def rate(self) -> float | None:
        """Samples per second in the steady time, or None if the run ended in the warm-up."""
        return self.steady_samples / self.steady_s if self.steady_s else None

    @property
    def wait_share(self) -> float | None:
        """Share (0 to 1) of the steady seconds in which the loop waited for the loader."""
        return sum(self.wait) / self.steady_s if self.steady_s else None


class Meter:
    """The timer of a training loop. It returns the rate of each window, and at the end all measurements.

    Args:
        stats: returns the loader's figures of all its epochs together, or None if it has none.
        step_ms: minimum time of a step in milliseconds, as if an accelerator computed while the host waits.
        device: device of the steps. The end of each window waits for it, because a rate counts finished work.
        traffic: timer of averaging gradients, or None with one rank.
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
        self._stats, self._warm = stats, Stats()
        self._traffic = traffic
        self._laps = Laps(device)
        self._begin = self._window_begin = self._steady_from = time.monotonic()
        self._window_samples = 0
        self._warm_cpu_s: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the loop's wait for a batch, in a block."""
        before = time.monotonic()
        yield
        now = time.monotonic()
        if self.measured.steps == 0:
            self.measured.first_batch_s = now - self._begin
        elif self.measured.steps >= WARMUP_STEPS:
            self.measured.wait.append(now - before)

    @contextmanager
    def stepping(self, samples: int) -> Iterator[None]:
        """Time a step on `samples` samples, in a block."""
        begin, until = self._laps.mark(), time.monotonic() + self._step_s
        yield
        measured = self.measured
        if self._step_s:
            time.sleep(max(0.0, until - time.monotonic()))
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
            if self._stats is not None:
                self._warm = self._stats()
            self._warm_cpu_s = cpu_seconds()
            self._steady_from = time.monotonic()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the writing of a checkpoint, in a block."""
        before = time.monotonic()
        yield
        self.measured.checkpoint_s += time.monotonic() - before
        self.measured.checkpoints += 1

    def window(self) -> float:
        """End a window of steps, and return its rate in samples per second."""
        self._settle()
        now = time.monotonic()
        rate = self._window_samples / (now - self._window_begin)
        self._window_begin, self._window_samples = now, 0
        if self.measured.steps > WARMUP_STEPS:
            self.measured.window_rates.append(rate)
        return rate

    def end(self) -> Measured:
        """Return the measurements. Call this after the last step."""
        self._settle()
        now, cpu_s = time.monotonic(), cpu_seconds()
        measured = self.measured
        measured.training_s = now - self._begin
        if measured.steps > WARMUP_STEPS:
            measured.steady_s = now - self._steady_from
            if cpu_s is not None and self._warm_cpu_s is not None:
                measured.steady_cpu_s = cpu_s - self._warm_cpu_s
        measured.stats = None if self._stats is None else less(self._stats(), self._warm)
        return measured

    def _settle(self) -> None:
        steps_s = self._laps.settle()
        # The times of warm-up steps are settled when the last of them ends, before any other step.
        if self.measured.steps > WARMUP_STEPS:
            self.measured.step.extend(steps_s)
        if self._traffic is not None:
            self.measured.communication_s += self._traffic.settle()
