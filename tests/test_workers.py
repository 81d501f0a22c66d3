"""A worker thread is set up as torch's worker processes are: one torch thread each, and nobody else is touched."""

from __future__ import annotations

import threading

import torch
from torch.utils.data import Dataset

import fastload


class Threads(Dataset[int]):
    """How many threads torch uses where the sample is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        torch.ones(200_000).add_(1.0)  # a parallel operation, before which torch may not know
        return torch.get_num_threads()


def test_workers_use_one_torch_thread_and_leave_the_others_theirs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with fastload.DataLoader(Threads(), num_workers=2, persistent_workers=True) as loader:
            for _ in range(2):
                assert [int(batch) for batch in loader] == [1] * 8
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)
