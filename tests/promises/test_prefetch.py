"""Promises:
- `prefetch_to` copies ahead on a separate stream, and its batches are right in the current stream. Simulated streams
  with controls stand for a GPU.
- The memory of a batch of `prefetch_to` is not used again too early, and memory that is not pinned is safe.
- `prefetch_to` copies at most `depth` batches ahead.
- Looking ahead never waits for a fastload loader and never reads from it. Ctrl-C during a copy loses no batch.
- `prefetch_to` copies any iterable ahead. Errors arrive in their place, and nothing is left over.
- The state of `prefetch_to` around a fastload loader counts the batches delivered to the loop, with threads, without
  threads and for iterable datasets. Other iterables have no state.
- On the CPU the batches of `prefetch_to` are the loader's own.

The device is SIMULATED: its streams put off what they are given, as a GPU's do, and run it as late or as early as
they may; memory is given out again the moment that it may be. Controls show that a missing wait, a missing
`record_stream` or a copy of memory that is not pinned would be seen.
"""

from __future__ import annotations

import copy
import json
import pickle
import threading
import weakref
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import fastload
from fastload import DataLoader, RankSampler, prefetch_to
from fastload.errors import LoaderClosedError
from tests.fakes import FailingDataset, Numbers
from tests.promises.reading import wait_until
from tests.resuming import resumes_twice

SIMULATED = torch.device("privateuseone:0")
Point = namedtuple("Point", "x y")


# ---- the simulated device ----


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, stream.enqueued


class Stream:
    """Operations that run in order, some time after they were put in."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.line: deque[Callable[[], None]] = deque()
        self.enqueued = self.done = 0

    def put(self, operation: Callable[[], None]) -> None:
        self.line.append(operation)
        self.enqueued += 1
        if self.machine.eager and self is not self.machine.default:
            self.run_to(self.enqueued)

    def run_to(self, place: int) -> None:
        while self.done < place:
            self.line.popleft()()
            self.done += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        if self.machine.honours_waits:
            self.put(lambda: event.stream.run_to(event.place))


class Block:
    """Memory of the device. Freed, it may be used again once the streams that were recorded are done."""

    def __init__(self, like: torch.Tensor, stream: Stream) -> None:
        self.memory = torch.zeros_like(like).as_subclass(torch.Tensor)
        self.stream = stream
        self.users: set[Stream] = set()
        self.in_use_until: list[tuple[Stream, int]] = []

    def is_free(self) -> bool:
        return all(stream.done >= place for stream, place in self.in_use_until)


class Machine:
    """Stands for `torch.cuda`. `eager`: copies run at once, and the default stream last; else copies run last."""

    now: Machine

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.honours_waits = self.honours_records = True
        self.default = Stream(self)
        self.current = self.default
        self.freed: list[Block] = []
        self.blocks = 0
        self.copies: list[tuple[Stream, float]] = []
        self.interrupts: list[BaseException] = []

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def current_device(self) -> int:
        return 0

    def Stream(self, device: torch.device) -> Stream:
        assert device == SIMULATED
        return Stream(self)

    def current_stream(self, device: torch.device) -> Stream:
        assert device == SIMULATED
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def allocate(self, like: torch.Tensor) -> Block:
        for block in self.freed:
            fits = block.stream is self.current and block.memory.shape == like.shape
            if fits and block.is_free():
                self.freed.remove(block)
                block.users, block.in_use_until = set(), []
                return block
        self.blocks += 1
        return Block(like, self.current)

    def free(self, block: Block) -> None:
        block.in_use_until = [(stream, stream.enqueued) for stream in block.users]
        self.freed.append(block)

    def synchronize(self) -> None:
        self.default.run_to(self.default.enqueued)


def void(_: Any) -> None: ...


class OnDevice(torch.Tensor):
    block: Block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SIMULATED

    def record_stream(self, stream: Any) -> None:
        if Machine.now.honours_records:
            self.block.users.add(stream)


class OnHost(torch.Tensor):
    pinned = True

    def is_pinned(self, *_: Any) -> bool:
        return self.pinned

    def to(self, device: Any, *, non_blocking: bool = False) -> Any:  # type: ignore[override]
        assert device == SIMULATED
        if Machine.now.interrupts:
            raise Machine.now.interrupts.pop()
        block, source = Machine.now.allocate(self), self.as_subclass(torch.Tensor)
        Machine.now.copies.append((Machine.now.current, float(source.flatten()[0])))
        Machine.now.current.put(lambda: void(block.memory.copy_(source)))
        if not non_blocking:
            Machine.now.current.run_to(Machine.now.current.enqueued)
        there = block.memory.as_subclass(OnDevice)
        there.block = block
        weakref.finalize(there, Machine.now.free, block)
        return there


def on_host(*values: float, pinned: bool = True) -> OnHost:
    tensor = torch.tensor(values).as_subclass(OnHost)
    tensor.pinned = pinned
    return tensor


def compute(tensor: Any, into: list[list[float]]) -> None:
    """A kernel of the loop: reads the memory when the current stream comes to it."""
    assert isinstance(tensor, OnDevice)
    memory = tensor.block.memory
    Machine.now.current.put(lambda: into.append(memory.tolist()))


@pytest.fixture(params=["copies late", "copies early"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(eager=request.param == "copies early")
    monkeypatch.setattr(torch, "privateuseone", made, raising=False)
    monkeypatch.setattr(Machine, "now", made, raising=False)
    return made


def computed(loader: Any, *, depth: int = 1) -> list[list[float]]:
    """What a loop computes of the first tensor of each batch, once the device is done."""
    results: list[list[float]] = []
    for tensor, _ in prefetch_to(loader, SIMULATED, depth=depth):
        compute(tensor, results)
    Machine.now.synchronize()
    return results


def pairs(n: int, *, pinned: bool = True) -> list[tuple[OnHost, int]]:
    return [(on_host(k, -k, pinned=pinned), k) for k in range(1, n + 1)]


# ---- the streams ----


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_current_stream_reads_what_was_copied(machine: Machine, depth: int) -> None:
    assert computed(pairs(20), depth=depth) == [[k, -k] for k in range(1, 21)]
    assert machine.default not in {stream for stream, _ in machine.copies}
    assert len({stream for stream, _ in machine.copies}) == 1


@pytest.mark.parametrize("missing", ["waits", "records"])
def test_control_a_missing_wait_or_record_would_be_seen(machine: Machine, missing: str) -> None:
    setattr(machine, f"honours_{missing}", False)
    seen = computed(pairs(20)) != [[k, -k] for k in range(1, 21)]
    assert seen == (machine.eager == (missing == "records"))


@pytest.mark.parametrize("pinned", [True, False])
def test_memory_that_is_not_pinned_may_be_written_again_at_once(
    machine: Machine, pinned: bool
) -> None:
    def batches() -> Iterator[tuple[OnHost, int]]:
        buffer = on_host(0.0, pinned=pinned)
        for k in range(1, 9):
            buffer.as_subclass(torch.Tensor).fill_(k)
            yield buffer, k

    right = computed(batches()) == [[k] for k in range(1, 9)]
    # Pinned memory is kept by torch's own allocator until it was copied; this buffer is not: the control.
    assert right == (not pinned or machine.eager)


def test_a_batch_waits_in_the_stream_that_is_current_when_it_is_handed_out(
    machine: Machine,
) -> None:
    results: list[list[float]] = []
    iterator = iter(prefetch_to(pairs(6), SIMULATED))
    users = [Stream(machine), machine.default, Stream(machine)]
    for user in users * 2:
        with machine.stream(user):
            compute(next(iterator)[0], results)
        user.run_to(user.enqueued)
    assert results == [[k, -k] for k in range(1, 7)]


def test_what_lies_on_the_device_is_neither_copied_nor_freed_too_early(machine: Machine) -> None:
    there = on_host(7.0).to(SIMULATED)
    ((got, label),) = list(prefetch_to([(there, 1)], SIMULATED))
    assert got is there
    assert label == 1
    assert len(machine.copies) == 1
    assert there.block.users == {machine.default}


def test_an_interrupted_copy_loses_no_batch(machine: Machine) -> None:
    iterator = iter(prefetch_to(pairs(5), SIMULATED))
    results: list[list[float]] = []
    for k in range(5):
        machine.interrupts = [KeyboardInterrupt()] if k in (0, 2, 3) else []
        try:
            batch = next(iterator)
        except KeyboardInterrupt:
            batch = next(iterator)
        compute(batch[0], results)
    machine.synchronize()
    assert results == [[k, -k] for k in range(1, 6)]


def test_a_copy_that_fails_arrives_in_its_place(machine: Machine) -> None:
    iterator = iter(prefetch_to(pairs(5), SIMULATED))
    assert [next(iterator)[1], next(iterator)[1]] == [1, 2]
    machine.interrupts = [MemoryError("out of memory on the device")]
    assert next(iterator)[1] == 3  # looks ahead to the fourth
    assert not machine.interrupts
    with pytest.raises(MemoryError):
        next(iterator)
    assert [batch[1] for batch in iterator] == [5]


# ---- looking ahead ----


class Gated:
    """Samples that wait for their gate, where there is one."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.gates: dict[int, threading.Event] = {}

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> float:
        if index in self.gates:
            assert self.gates[index].wait(30)
        return float(index)


def to_host(samples: list[float]) -> tuple[OnHost, float]:
    return on_host(*samples), samples[0]


def test_a_loader_is_not_waited_for_to_look_ahead(machine: Machine) -> None:
    dataset = Gated(4)
    dataset.gates = {1: threading.Event(), 3: threading.Event()}
    loader = DataLoader(dataset, 1, num_workers=2, collate_fn=to_host, prefetch_batches=4)
    iterator = iter(prefetch_to(loader, SIMULATED))
    assert next(iterator)[1] == 0  # the second is not there, and nobody opens its gate
    assert len(machine.copies) == 1
    dataset.gates[1].set()
    assert next(iterator)[1] == 1
    assert next(iterator)[1] == 2
    assert len(machine.copies) == 3
    dataset.gates[3].set()
    assert [batch[1] for batch in iterator] == [3]
    loader.close()


def test_a_batch_that_is_ready_is_copied_before_the_loop_asks_for_it(machine: Machine) -> None:
    loader = DataLoader(Gated(6), 1, num_workers=2, collate_fn=to_host, prefetch_batches=6)
    iterator: Any = iter(prefetch_to(loader, SIMULATED, depth=2))
    source = iterator._source
    wait_until(lambda: len(source._window._ready_tickets) == 6, "all are ready")
    next(iterator)
    assert [value for _, value in machine.copies] == [0, 1, 2]
    next(iterator)
    assert [value for _, value in machine.copies] == [0, 1, 2, 3]
    loader.close()


def test_without_workers_no_sample_is_read_to_look_ahead(machine: Machine) -> None:
    read: list[int] = []

    class Counting(Gated):
        def __getitem__(self, index: int) -> float:
            read.append(index)
            return super().__getitem__(index)

    iterator = iter(prefetch_to(DataLoader(Counting(4), 1, collate_fn=to_host), SIMULATED))
    next(iterator)
    next(iterator)
    assert read == [0, 1]


@pytest.mark.parametrize("depth", [1, 3])
def test_any_other_iterable_is_read_ahead_by_the_depth_but_for_the_first_batch(
    machine: Machine, depth: int
) -> None:
    asked: list[int] = []

    def batches() -> Iterator[tuple[OnHost, int]]:
        for pair in pairs(10):
            asked.append(pair[1])
            yield pair

    iterator = iter(prefetch_to(batches(), SIMULATED, depth=depth))
    assert asked == []
    for k in range(1, 11):
        assert next(iterator)[1] == k
        assert len(asked) == (1 if k == 1 else min(10, k + depth))
    assert list(iterator) == []
    assert list(iterator) == []


@pytest.mark.parametrize("struck", ["state", "copy"])
def test_ctrl_c_after_the_loader_has_given_a_batch_loses_none(
    struck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = prefetch_to(DataLoader(Numbers(12), 4, seed=3), "cpu")
    iterator: Any = iter(loader)
    owner = type(iterator) if struck == "state" else type(iterator._copier)
    name = "_state" if struck == "state" else "start"
    whole = getattr(owner, name)
    strikes = [False, True, True]

    def strike(*args: Any) -> Any:
        if strikes and strikes.pop(0):
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(owner, name, strike)
    got = [next(iterator).tolist()]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    got += [batch.tolist() for batch in iterator]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# ---- the state ----


class Counter(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(map(float, range(first, 21, step)))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled, threads": lambda: DataLoader(
        Gated(21), 4, shuffle=True, num_workers=2, collate_fn=to_host, seed=3
    ),
    "torch's shuffle": lambda: DataLoader(
        Gated(21), 4, shuffle=True, num_workers=2, collate_fn=to_host
    ),
    "persistent": lambda: DataLoader(
        Gated(21), 4, num_workers=2, collate_fn=to_host, seed=3, persistent_workers=True
    ),
    "no workers": lambda: DataLoader(Gated(21), 4, shuffle=True, collate_fn=to_host, seed=3),
    "iterable": lambda: DataLoader(Counter(), 4, num_workers=2, collate_fn=to_host),
}


def values(batch: tuple[Any, float]) -> list[float]:
    Machine.now.synchronize()
    assert isinstance(batch[0], OnDevice)
    return batch[0].block.memory.tolist()


def look_far_ahead(iterator: Any) -> None:
    """Let the loader get ready what the look-ahead can then fetch."""
    source = iterator._source
    if source._readers.who.number:
        wait_until(
            lambda: (
                source.is_ready()
                or (oldest := source._window.oldest()) is None
                or oldest.epoch != source._order.epoch
            ),
            "the next batch is ready",
        )


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("machine", ["copies late"], indirect=True)
def test_the_state_says_what_the_loop_has_had(machine: Machine, kind: str) -> None:
    torch.manual_seed(5)
    plain, expected, states = LOADERS[kind](), [], []
    iterator = iter(plain)
    states.append(json.dumps(plain.state_dict()))
    for batch in iterator:
        expected.append(batch[0].tolist())
        states.append(json.dumps(plain.state_dict()))
    states.append(json.dumps(plain.state_dict()))  # it is told that there are no more
    assert len(expected) in (6, 7)

    torch.manual_seed(5)
    ahead = prefetch_to(LOADERS[kind](), SIMULATED, depth=3)
    running: Any = iter(ahead)
    fetched_ahead = 0
    for k, batch in enumerate(expected):
        assert json.dumps(ahead.state_dict()) == states[k]
        look_far_ahead(running)
        assert values(next(running)) == batch
        fetched_ahead = max(fetched_ahead, len(running._pending))
    assert json.dumps(ahead.state_dict()) == states[-2]
    assert next(running, None) is None
    assert json.dumps(ahead.state_dict()) == states[-1]
    assert fetched_ahead > 0 or kind == "no workers"

    for k in (0, 1, 3, len(expected)):
        resumed = prefetch_to(LOADERS[kind](), SIMULATED, depth=2)
        resumed.load_state_dict(json.loads(states[k]))
        assert json.dumps(resumed.state_dict()) == states[k]
        assert [values(batch) for batch in resumed] == expected[k:]


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "torch's shuffle"])
@pytest.mark.parametrize("machine", ["copies late"], indirect=True)
def test_a_second_resume_and_two_epochs_after_it(machine: Machine, kind: str) -> None:
    resumes_twice(lambda: prefetch_to(LOADERS[kind](), SIMULATED, depth=2), values)


class Stateful(list[float]):
    """Batches with a state of their own, which would count those that were copied ahead."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Joined(DataLoader[Any]):
    """Hands out pairs of batches, of which the loader's state knows nothing."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return zip(batches, batches, strict=False)


def test_only_fastloads_own_loader_has_a_state() -> None:
    samples: Any = [1, 2, 3]
    for loader in (samples, TorchDataLoader(samples), Stateful(samples), Joined(samples)):
        ahead: Any = prefetch_to(loader, "cpu")
        list(ahead)
        for ask in (ahead.state_dict, lambda to=ahead: to.load_state_dict({})):
            with pytest.raises(
                AttributeError, match=f"no state_dict.*got '{type(loader).__name__}'"
            ):
                ask()


# ---- errors and the end ----


@pytest.mark.parametrize("machine", ["copies late"], indirect=True)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_arrives_behind_the_batches_before_it(machine: Machine, num_workers: int) -> None:
    dataset = FailingDataset(Gated(20), failures={9: ValueError("sample nine")})
    loader = DataLoader(dataset, 4, num_workers=num_workers, collate_fn=to_host)
    ahead = prefetch_to(loader, SIMULATED, depth=3)
    iterator: Any = iter(ahead)
    got: list[Any] = []
    while True:
        look_far_ahead(iterator)
        try:
            got.append(next(iterator)[1])
        except ValueError as error:
            got.append(str(error))
            assert any("index 9" in note for note in error.__notes__)
            assert ahead.state_dict()["batches"] == 3, "as without: it counts as handed out"
        except StopIteration:
            break
    assert got == [0, 4, "sample nine", 12, 16]


def test_leaving_the_loop_ends_the_iterator_of_the_loader(machine: Machine) -> None:
    ended = threading.Event()

    def batches() -> Iterator[tuple[OnHost, int]]:
        try:
            yield from pairs(10)
        finally:
            ended.set()

    for _, k in prefetch_to(batches(), SIMULATED, depth=3):
        if k == 2:
            break
    assert ended.is_set()


def test_with_and_close_end_the_threads(machine: Machine) -> None:
    with prefetch_to(LOADERS["persistent"](), SIMULATED) as ahead:
        iterator = iter(ahead)
        next(iterator)
    with pytest.raises(LoaderClosedError):
        list(iterator)


# ---- batches and the CPU ----


def test_containers_keep_their_types(machine: Machine) -> None:
    tensor = on_host(1.0)
    batch = {
        "named": Point(tensor, [tensor, "text"]),
        "ordered": OrderedDict(a=tensor),
        "user": UserDict(a=(tensor, None)),
        "proxy": MappingProxyType({"a": tensor}),
        "none": (),
        "others": [1, "b", b"c", {2}],
    }
    (moved,) = list(prefetch_to([batch], SIMULATED))
    assert list(moved) == list(batch)
    for key, value in moved.items():
        assert type(value) is type(batch[key])
    named, user = moved["named"], moved["user"]
    inner = (named.x, named.y[0], moved["ordered"]["a"], user["a"][0], moved["proxy"]["a"])
    assert all(isinstance(tensor, OnDevice) for tensor in inner)
    assert moved["named"].y[1] == "text"
    assert moved["others"] is batch["others"]
    assert batch["user"]["a"][0] is tensor, "what the loader gave is as it was"


def test_on_the_cpu_a_batch_is_the_loaders_own_and_nothing_is_read_ahead() -> None:
    batches = [{"x": torch.ones(2)}, [torch.ones(1), {"y": (torch.ones(1),)}], "text"]
    source = iter(batches)
    iterator = iter(prefetch_to(source, "cpu", depth=3))
    assert next(iterator) is batches[0]
    assert next(iterator) is batches[1]
    assert next(source) == "text"
    assert list(iterator) == []


def test_epochs_and_attributes_are_the_loaders() -> None:
    sampler = RankSampler(Gated(12), rank=0, world_size=1, seed=1)
    loader = DataLoader(Gated(12), 4, sampler=sampler, seed=1)
    ahead = prefetch_to(loader, "cpu")
    assert len(ahead) == 3
    assert ahead.sampler is sampler
    assert ahead.batch_size == 4
    epochs = [[batch.tolist() for batch in ahead] for _ in range(2)]
    assert epochs[0] != epochs[1]
    ahead.set_epoch(0)
    assert [batch.tolist() for batch in ahead] == epochs[0]
    assert ahead.stats().batches == 3
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ahead.no_such_name
    with pytest.raises(TypeError, match="len"):
        len(prefetch_to(iter([1]), "cpu"))
    assert repr(ahead) == f"prefetch_to({loader!r}, 'cpu', depth=1)"
    for made in (copy.deepcopy(ahead), pickle.loads(pickle.dumps(prefetch_to([1, 2], "cpu")))):
        assert len(list(made)) == len(made)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="depth must be 1 or more, got 0"):
        prefetch_to([], "cpu", depth=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no 'cuda' here"):
            fastload.prefetch_to([], "cuda")
