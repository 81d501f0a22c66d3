"""Promise: Every private name of torch that fastload uses means what fastload expects, on the oldest and the newest
torch.
"""

from __future__ import annotations

import threading
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
from fastload.random import torch_random

seed_imported_before = torch.manual_seed


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


def test_pinning_reaches_into_containers() -> None:
    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    pinned = torch_private.pin({"a": [Pinned(), "text"], "b": (1, Pinned())})
    assert pinned["a"] == ["pinned", "text"]
    assert list(pinned["b"]) == [1, "pinned"]  # a list with torch 2.8, a tuple later


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


@pytest.mark.parametrize("size", [(7, 5), (1, 1), (61, 90)])
def test_resizing_is_interpolate_s_antialiased_one_byte_by_byte(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (31, 45, 3), dtype=np.uint8)
    before = pixels.copy()
    resized = torch_private.resize_antialiased(pixels, size)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(
        planes, size, mode="bilinear", antialias=True, align_corners=False
    )
    assert resized.dtype == np.uint8
    assert (resized == expected[0].permute(1, 2, 0).numpy()).all()
    assert resized.flags.c_contiguous  # pixel by pixel, as the input: what makes it fast
    assert (pixels == before).all()
    assert not np.shares_memory(resized, pixels)


def test_seeding_acts_on_the_thread_s_own_generator_whoever_imported_it() -> None:
    before = getattr(torch.random, "_fastload_generator", lambda: None)
    local = threading.local()
    own = torch.Generator()

    def seed() -> None:
        local.own = own
        assert seed_imported_before(5) is own
        assert (torch.initial_seed(), own.initial_seed()) == (5, 5)
        torch.manual_seed(seed=6)
        state = torch.get_rng_state()
        assert torch.equal(state, torch.Generator().manual_seed(6).get_state())
        assert torch.seed() == torch.initial_seed() == own.initial_seed() != 6
        torch.set_rng_state(new_state=state)
        assert torch.equal(own.get_state(), state)

    torch_private.seed_in_threads(lambda: getattr(local, "own", None))
    try:
        torch.manual_seed(3)
        in_a_thread(seed)
        # A thread without one, and the loop's: as ever.
        assert torch.initial_seed() == 3
        assert in_a_thread(torch.initial_seed) == 3
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
        assert in_a_thread(lambda: seed_imported_before(4)) is torch.default_generator
        assert torch.initial_seed() == 4
        state = torch.get_rng_state()
        drawn = torch.rand(1)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(1), drawn)
        assert torch.seed() == torch.default_generator.initial_seed()
    finally:
        torch_private.seed_in_threads(before)


def test_kernels_are_called_in_threads_that_look_at_their_key_and_for_their_operators_alone() -> (
    None
):
    torch_random.install()
    show = torch_random._show
    assert show is not None
    routed = {f"aten::{name}" for name in torch_random.kernels()}
    known = torch._C._dispatch_get_registrations_for_dispatch_key(torch_private._KERNELS_KEY)
    assert set(known) == {name.replace(".default", "") for name in routed}
    torch.manual_seed(1)
    hidden = torch.rand(3)
    torch_random.enter(lambda: torch.Generator().manual_seed(2))
    try:
        shown = torch.rand(3)
        show(False)
        hidden_again = torch.rand(3)
        show(True)
        assert torch.equal(torch.rand(3), shown)
    finally:
        torch_random.enter(None)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), hidden)
    assert torch.equal(torch.rand(3), hidden_again)
    assert torch.equal(shown, torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_the_default_generator_is_known_whatever_object_stands_for_it() -> None:
    assert torch_private.is_default_generator(torch.default_generator)
    assert not torch_private.is_default_generator(torch.Generator())
    seeded = torch.Generator().manual_seed(1)
    torch_random.install()
    torch_random.enter(lambda: seeded)
    try:  # the kernel gets another object for it
        drawn = torch.rand(3, generator=torch.default_generator)
    finally:
        torch_random.enter(None)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_computing_without_values_is_seen() -> None:
    assert (torch_private.dispatch_modes(), torch_private.is_faking()) == (0, False)
    with FakeTensorMode():
        assert (torch_private.dispatch_modes(), torch_private.is_faking()) == (1, True)
        assert in_a_thread(torch_private.dispatch_modes) == 0
