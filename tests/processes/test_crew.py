"""Promises:
- Ctrl-C in `iter()` with persistent workers leaves nothing half begun: the next epoch is whole.
- `close()` is quick, however many batches processes still answer.
- A large ticket for which the loop's process has no descriptor is an error in its place.
- A signal handler may ask for `stats()` at any moment.
- A loop in a mode of torch's gets ordinary batches.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastload.processes.wire import Packet, Wire
from tests.fakes import Numbers, no_descriptors
from tests.processes.holding import outcomes, processes

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_ctrl_c_as_iter_sends_leaves_nothing_half_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    send: Callable[..., bool] = Wire.send_packet

    def struck(wire: Wire, packet: Packet, *, waits: bool) -> bool:
        send(wire, packet, waits=waits)
        monkeypatch.setattr(Wire, "send_packet", send)
        raise KeyboardInterrupt

    with processes(Numbers(40), 2, workers=1, persistent_workers=True) as loader:
        assert len(list(loader)) == 20
        monkeypatch.setattr(Wire, "send_packet", struck)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert torch.cat(list(loader)).tolist() == [*range(40)]


@pytest.mark.parametrize(("workers", "over"), [(1, None), (4, 2)])
def test_many_batches_in_flight_delay_no_end(workers: int, over: int | None) -> None:
    options = {"worker_processes": over, "prefetch_batches": 60}
    loader = processes(Numbers(400), 4, workers=workers, **options)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 3.0


def test_a_large_ticket_without_a_descriptor_is_an_error_in_its_place() -> None:
    sampler = [[*range(k, k + 20_000)] for k in range(8)]
    options = {"sampler": sampler, "prefetch_batches": 1, "collate_fn": len}
    with processes(Numbers(30_000), None, workers=1, **options) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        with no_descriptors():
            got.append(next(iterator))  # it issues the ticket of the batch after next
        got += outcomes(iterator)
    kinds = [type(each) for each in got]
    assert kinds.count(OSError) >= 1
    assert (len(got), {*kinds}) == (8, {int, OSError})


def test_a_signal_handler_may_ask_for_stats() -> None:
    with processes(Numbers(4000), 1, workers=2) as loader:
        before = signal.signal(signal.SIGALRM, lambda *_: loader.stats())
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            assert torch.cat(list(loader)).tolist() == [*range(4000)]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counts, torch.inference_mode, lambda: torch.device("meta")])
def test_a_loop_in_a_mode_gets_ordinary_batches(mode: Callable[[], Any]) -> None:
    with processes(Numbers(40), 4, workers=2) as loader:
        iterator = iter(loader)
        with mode():
            got = list(iterator)
    assert torch.cat(got).tolist() == [*range(40)]
    assert not any(batch.is_inference() for batch in got)
