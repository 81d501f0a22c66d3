"""What every test of a state does, for every source: resume twice, and run two more epochs. Also bad states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch


def as_lists(batch: Any) -> Any:
    """Return a batch as Python lists, which compare by value."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: as_lists(value) for key, value in batch.items()}
    return [as_lists(part) for part in batch] if isinstance(batch, list | tuple) else batch


def through_json(state: Any) -> Any:
    """Return what a file would give back."""
    again = json.loads(json.dumps(state, allow_nan=False))
    assert again == state
    return again


def resumes_twice(
    make: Callable[[], Any],
    plain: Callable[[Any], Any] = as_lists,
    whole_by: Callable[[], Any] | None = None,
    ways: Iterable[bool] = (False, True),
) -> None:
    """Stop in the second epoch, resume, stop, resume, and go on for two epochs: batches are those of a run in one go.

    Both with a new loader for each resume, as in another process, and with one loader that loads again.

    Args:
        make: makes a loader with a seed, or with generators that a state restores, of epochs of four batches or more.
        plain: makes a batch comparable.
        whole_by: makes a loader of the same batches for the run in one go, if that of `make` is dear.
        ways: whether one loader loads again.
    """
    with (whole_by or make)() as loader:
        whole = [[plain(batch) for batch in loader] for _ in range(4)]
    assert len(whole[1]) > 3
    for again in ways:
        loader = make()
        list(loader)
        got: list[Any] = []
        for count in (1, 2, None):
            got += [plain(batch) for batch in islice(iter(loader), count)]
            if count is None:
                break
            state = through_json(loader.state_dict())
            if not again:
                loader.close()
                loader = make()
            loader.load_state_dict(state)
        assert got == whole[1], f"the epoch in which it resumed, with {again=}"
        for epoch in (2, 3):
            assert [plain(batch) for batch in loader] == whole[epoch], f"{epoch=}, {again=}"
        loader.close()
