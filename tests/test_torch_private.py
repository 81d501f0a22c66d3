"""Promise: Every private name of torch that fastload uses means what fastload expects, on the oldest and the newest
torch. See also `tests/promises/test_randomness.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from torch.utils.data import get_worker_info as imported_before
from torch.utils.data._utils import collate as torch_collate

from fastload._kit import torch_private


def in_a_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_worker_info_is_seen_by_whoever_imported_the_function_and_in_its_thread_alone() -> None:
    torch_private.show_worker_info_in_threads()
    torch_private.show_worker_info_in_threads()  # again: no harm
    info = torch_private.make_worker_info(3, 5, 77, "dataset")

    def look() -> tuple[Any, Any]:
        torch_private.set_worker_info(info)
        seen = imported_before(), torch.utils.data.get_worker_info()
        torch_private.set_worker_info(None)
        return (*seen, imported_before())

    assert in_a_thread(look) == (info, info, None)
    assert imported_before() is None
    assert (info.id, info.num_workers, info.seed, info.dataset) == (3, 5, 77, "dataset")


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


class _Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Own(torch.Tensor):
    """A subclass whose `__torch_function__` is called for what is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError(func.__name__)


def test_without_torch_functions_neither_modes_nor_subclasses_see_a_call() -> None:
    own = torch.zeros(2).as_subclass(_Own)
    with _Noting() as mode:
        torch.ones(1).add(1)
        with torch_private.no_torch_function():
            with torch_private.no_torch_function():
                torch.ones(1).add(1)
            assert type(own.add(1)) is torch.Tensor
            with pytest.raises(LookupError, match="sub"):
                in_a_thread(lambda: own.sub(1))  # the block is the thread's own
        with pytest.raises(ValueError, match="within"), torch_private.no_torch_function():
            raise ValueError("within")
        torch.ones(1).mul(1)
    assert [name for name in mode.seen if name in ("add", "sub", "mul")] == ["add", "mul"]
    with pytest.raises(LookupError, match="add"):
        own.add(1)


def test_computing_without_values_is_seen() -> None:
    assert (torch_private.dispatch_modes(), torch_private.is_faking()) == (0, False)
    with FakeTensorMode():
        assert (torch_private.dispatch_modes(), torch_private.is_faking()) == (1, True)
        assert in_a_thread(torch_private.dispatch_modes) == 0
