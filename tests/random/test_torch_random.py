"""Promises:
- torch's random functions draw from a generator of the calling thread in a worker, and from the global generator in
  all other threads.
- Compiled code, forked children and the end of the process are as without fastload.

That each function draws what torch draws is shown in tests/promises/test_randomness.py.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional

from fastload.random import torch_random
from tests.children import run_python
from tests.random.forks import in_child


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    torch_random.install()
    assert torch_random.unusable() is None
    yield
    torch_random.enter(None)


def entered(draw: Callable[[], Any], own: torch.Generator | None = None) -> Any:
    """Return `draw()` as computed by this thread while it has entered; the global generator stays as it was."""
    own = own or generator()
    before = torch.default_generator.get_state()
    torch_random.enter(lambda: own)
    try:
        return draw()
    finally:
        torch_random.enter(None)
        assert torch.equal(torch.default_generator.get_state(), before)


def numbers(draw: Callable[[], Any]) -> list[float]:
    """Return what `draw()` gives if torch's global generator is seeded as `generator()` is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drawn: list[float] = draw().tolist()
        return drawn


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# ---- who sees it ----


def test_other_threads_and_one_that_has_left_draw_from_the_global_generator() -> None:
    def draw() -> list[float]:
        torch.manual_seed(3)
        return torch.rand(3).tolist()  # type: ignore[no-any-return]

    expected = torch.rand(3, generator=generator(3)).tolist()
    torch_random.enter(generator)
    assert in_a_thread(draw) == expected
    torch_random.enter(None)
    assert draw() == expected


def test_errors_are_torch_s_own_and_the_next_draw_is_the_thread_s() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: torch.empty(2).uniform_(5, 1),
        lambda: torch.randint(5, 1, (2,)),
        lambda: torch.rand(2, generator=torch.Generator("meta")),
    ]

    def wrong() -> list[tuple[type, str]]:
        raised = []
        for call in calls:
            with pytest.raises((RuntimeError, TypeError)) as caught:
                call()
            raised.append((caught.type, str(caught.value).partition("\n")[0]))
        return raised

    assert entered(wrong) == wrong()
    assert entered(lambda: (wrong(), torch.rand(3))[1]).tolist() == numbers(lambda: torch.rand(3))


# ---- other ways through torch ----


COMPILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(3) + x,
    "in place": lambda x: torch.empty(3).uniform_() + x,
    "dropout": lambda x: functional.dropout(x),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_draws_what_it_draws_elsewhere(name: str, backend: str) -> None:
    """As it is compiled, and after that, in a thread that has entered, and in one that has not."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own imports
        compiled = torch.compile(COMPILED[name], backend=backend, fullgraph=True)

        def draw() -> torch.Tensor:
            return compiled(torch.full((3,), 0.5))

        first, second = entered(draw).tolist(), entered(draw).tolist()
        assert first == second == numbers(draw)
        assert entered(draw).tolist() == first


# ---- processes ----

ENDING = """
    import sys, threading, time, torch, fastload

    class Endless(torch.utils.data.Dataset):
        def __len__(self):
            return 10**6
        def __getitem__(self, index):
            for _ in range(100):
                torch.rand(3).add(torch.randint(9, (3,)))
            return index

    loader = fastload.DataLoader(Endless(), 4, num_workers=3, seed=1)
    batches = iter(loader)
    next(batches)
    if "exit" in sys.argv:
        sys.exit(3)
    print("end")
"""


@pytest.mark.parametrize(
    ("how", "times"),
    [("end", 1), *(pytest.param(how, 3, marks=pytest.mark.slow) for how in ("exit", "end"))],
)
def test_a_process_may_end_while_workers_draw(how: str, times: int) -> None:
    for _ in range(times):
        done = run_python("-c", textwrap.dedent(ENDING), how)
        assert (done.returncode, done.stderr) == (3 if how == "exit" else 0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_of_a_thread_that_has_entered_draws_on() -> None:
    drawn = entered(lambda: in_child(lambda: torch.rand(1).tolist()))
    assert drawn == numbers(lambda: torch.rand(1))


# ---- where it cannot be ----


@pytest.mark.parametrize("failing", ["_works", "register_kernels"])
def test_if_the_test_at_the_start_raises_no_thread_is_routed(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("another schema")

    shown: list[bool] = []
    for name, value in (("_show", None), ("_failure", None), ("_installed", False)):
        monkeypatch.setattr(torch_random, name, value)
    monkeypatch.setattr(torch_random, "register_kernels", lambda _: shown.append)
    monkeypatch.setattr(torch_random, failing, fail)
    torch_random.install()
    torch_random.enter(generator)
    assert "another schema" in (torch_random.unusable() or "")
    assert shown == []
