"""Plans in files: ranks and later runs read a plan that one of them made."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from fastload._kit.disk import locked_path, open_file, replace_file
from fastload.sequences.token_plan import Plan, index_dtype


def cached_plan(folder: str, series: str, number: int, make: Callable[[], Plan]) -> Plan:
    """Return a plan from a folder. If it is not there, make it, while other processes that want it wait.

    Args:
        series: 32 hex digits of all that the plans depend on, besides their number.
        number: the epoch. After a plan is written, those of the same series with lower numbers are deleted.

    A file that is damaged, or is another plan, is replaced. If the folder cannot be written, warn.
    """
    name = f"{series}-{number}"
    path = os.path.join(folder, f"{name}.plan")
    plan = _load(path, name)
    try:
        with nullcontext() if plan else locked_path(f"{path}.lock", needed=False):
            plan = plan or _load(path, name)
            if plan is None:
                plan = make()
                _save(plan, path, name)
                _delete_before(folder, series, number)
    except OSError as error:
        warnings.warn(
            f"fastload: the plan of epoch {number} is not cached: {error}. Give TokenBatchSampler a cache= that can be "
            "written, or none",
            stacklevel=2,
        )
    return plan or make()


def _save(plan: Plan, path: str, name: str) -> None:
    numbers = np.array([len(plan.order), plan.useful, plan.padded], np.uint64)
    parts: list[Any] = [_head(name), numbers, plan.order, plan.starts]
    digest = hashlib.blake2b(digest_size=16)
    with replace_file(path, durable=False) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def _load(path: str, name: str) -> Plan | None:
    """Return the plan in a file, or None if there is none, if it is damaged, or of another name."""
    with suppress(OSError, ValueError):
        with open_file(path) as file:  # read, not mapped: another node may delete the file
            content = memoryview(file.read())
        begin = len(_head(name))
        digest = hashlib.blake2b(content[:-16], digest_size=16).digest()
        if content[:begin] == _head(name) and content[-16:] == digest:
            n, useful, padded = np.frombuffer(content, np.uint64, 3, begin).tolist()
            body = np.frombuffer(content[begin + 24 : -16], index_dtype(n))
            return Plan(body[:n], body[n:], useful, padded)
    return None


def _head(name: str) -> bytes:
    return b"fastload plan 1\n" + name.encode().ljust(64)


def _delete_before(folder: str, series: str, number: int) -> None:
    for file in os.listdir(folder):
        found = re.fullmatch(rf"{series}-(\d+)\.plan(\.lock)?", file)
        if found and int(found[1]) < number:
            with suppress(FileNotFoundError):  # another node deletes it, too
                os.unlink(os.path.join(folder, file))
