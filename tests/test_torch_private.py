"""Every private name of torch that fastload uses still means what is thought, on the torch that is installed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import get_worker_info as imported_before
from torch.utils.data._utils import collate as torch_collate

from fastload import torch_private


def in_a_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_worker_info_is_seen_by_whoever_imported_the_function_and_in_its_thread_alone() -> None:
    torch_private.show_worker_info_in_threads()
    torch_private.show_worker_info_in_threads()  # again: no harm
    info = torch_private.make_worker_info(3, 5, 77, "data set")

    def look() -> tuple[Any, Any]:
        torch_private.set_worker_info(info)
        seen = imported_before(), torch.utils.data.get_worker_info()
        torch_private.set_worker_info(None)
        return (*seen, imported_before())

    assert in_a_thread(look) == (info, info, None)
    assert imported_before() is None
    assert (info.id, info.num_workers, info.seed, info.dataset) == (3, 5, 77, "data set")


class _Info(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        info = imported_before()
        return -1 if info is None else info.id


def test_worker_info_still_works_in_torch_s_own_processes() -> None:
    torch_private.show_worker_info_in_threads()
    loader = DataLoader(_Info(), num_workers=2, multiprocessing_context="fork")
    assert [int(batch) for batch in loader] == [0, 1]


def test_collate_shares_memory_only_under_a_worker_info() -> None:
    # The reason why user code has a worker info and collating has none.
    def collate(info: Any) -> bool:
        torch_private.set_worker_info(info)
        try:
            return bool(default_collate([torch.zeros(3)]).is_shared())
        finally:
            torch_private.set_worker_info(None)

    torch_private.show_worker_info_in_threads()
    assert in_a_thread(lambda: collate(torch_private.make_worker_info(0, 1, 0, None)))
    assert not in_a_thread(lambda: collate(None))


def test_handlers_are_those_that_torch_would_call() -> None:
    assert torch_private.collate_handler(torch.Tensor) is torch_private.collate_tensors
    assert torch_private.collate_handler(np.ndarray) is torch_private.collate_arrays
    for container in (tuple, list, dict, object):
        assert torch_private.collate_handler(container) is None
    for kind in (int, bool, float, str, bytes, np.float32, np.bool_):
        assert torch_private.collate_handler(kind) is not None

    class Mine(tuple[Any, ...]):
        __slots__ = ()

    def collate_mine(batch: Any, *, collate_fn_map: Any = None) -> str:
        return "mine"

    torch_collate.default_collate_fn_map[Mine] = collate_mine
    try:
        assert default_collate([Mine((1, 2))]) == "mine"
        assert torch_private.collate_handler(Mine) is collate_mine
    finally:
        del torch_collate.default_collate_fn_map[Mine]


def test_pinning_reaches_into_containers() -> None:
    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    pinned = torch_private.pin({"a": [Pinned(), "text"], "b": (1, Pinned())})
    assert pinned["a"] == ["pinned", "text"]
    assert list(pinned["b"]) == [1, "pinned"]  # a list with torch 2.8, a tuple later


def test_threads_of_torch_are_counted_per_thread_once_looked_at() -> None:
    # The reason for the order in `Crew`: look, let the workers set theirs, set it back.
    before = torch.get_num_threads()
    thread = threading.Thread(target=torch.set_num_threads, args=(1,))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)
    assert in_a_thread(torch.get_num_threads) == before


def test_a_number_of_threads_set_before_it_was_looked_at_is_not_kept() -> None:
    # The reason why `_settle` looks first.
    torch.get_num_threads()

    def count(look_first: bool) -> int:
        ready, go = threading.Event(), threading.Event()

        def body() -> int:
            if look_first:
                torch.get_num_threads()
            torch.set_num_threads(1)
            ready.set()
            assert go.wait(10)
            return torch.get_num_threads()

        before = torch.get_num_threads()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(body)
            assert ready.wait(10)
            torch.set_num_threads(7)
            go.set()
            try:
                return future.result()
            finally:
                torch.set_num_threads(before)

    assert count(look_first=True) == 1


def test_the_profiler_s_flag_is_seen_in_all_threads() -> None:
    # The reason why it is asked, and not torch's functions, which know of their own thread.
    assert not torch_private.profiler_is_on()
    with (
        ThreadPoolExecutor(1) as pool,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        assert torch_private.profiler_is_on()
        assert pool.submit(torch_private.profiler_is_on).result()
    assert not torch_private.profiler_is_on()


def test_a_profile_sees_threads_that_run_already_only_by_our_configuration() -> None:
    def record() -> None:
        with torch.profiler.record_function("span"):
            pass

    def seen(pool: ThreadPoolExecutor, config: Any) -> int:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=cpu, experimental_config=config, acc_events=True
        ) as profile:
            pool.submit(record).result()
        return sum(event.name == "span" for event in profile.events())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(record).result()
        assert seen(pool, torch_private.all_threads_profiler_config()) == 1
        assert seen(pool, None) == 0
