"""Trainings with Accelerate that are saved, and go on as a new program."""

from __future__ import annotations

from typing import Any

from tests.promises.accelerate_cases import Spec, begin, close, plain


def resumed_all(cases: list[tuple[Spec, dict[str, Any]]], folder: str) -> list[Any]:
    return [
        resumed(spec, options, f"{folder}/{number}") for number, (spec, options) in enumerate(cases)
    ]


STOPS = [(0, 1), (1, 1), (1, 2)]
"""Epoch and number of batches at which a training is saved."""


def resumed(spec: Spec, options: dict[str, Any], folder: str) -> Any:
    """Train three epochs. Return the batches after each of `STOPS`: undisturbed, and as a new program gives them.

    Each new program loads what the one before it saved, and saves at the next stop.
    """
    accelerator, loader = begin("ours", spec, options)
    whole: dict[tuple[int, int], Any] = {}
    for epoch in range(3):
        for step, batch in enumerate(loader):
            whole[epoch, step] = plain(batch)
            if (epoch, step + 1) == STOPS[0]:
                accelerator.save_state(f"{folder}/0")
    close(loader)
    answers = []
    for number, stop in enumerate(STOPS):
        accelerator, loader = begin("ours", spec, options, seed=99)
        accelerator.load_state(f"{folder}/{number}")
        rest: dict[tuple[int, int], Any] = {}
        epoch, step = stop
        while epoch < 3:
            for batch in loader:
                rest[epoch, step] = plain(batch)
                step += 1
                if (epoch, step) in STOPS[number + 1 : number + 2]:
                    accelerator.save_state(f"{folder}/{number + 1}")
            epoch, step = epoch + 1, 0
        close(loader)
        answers.append(([(key, whole[key]) for key in whole if key >= stop], list(rest.items())))
    return answers


def skipped(spec: Spec, folder: str) -> Any:
    """Return epochs 1 and 2 undisturbed, and as they are after two batches of epoch 1 were skipped, in each way.

    With the number of samples that were read of epoch 1.
    """
    accelerator, loader = begin("ours", spec, {})
    epochs = [plain(list(loader))]
    batches = iter(loader)
    epochs.append(plain([next(batches), next(batches)]))
    accelerator.save_state(f"{folder}/1")
    epochs[1] += plain(list(batches))
    epochs.append(plain(list(loader)))
    close(loader)
    answers = {}
    for way in ("set before", "set after", "two epochs", "loaded", "loaded more", "loaded another"):
        accelerator, loader = begin("ours", spec, {})
        if way == "set before":
            loader.set_epoch(1)
        elif way == "two epochs":
            list(loader)
        elif way.startswith("loaded"):
            accelerator.load_state(f"{folder}/1")
        if way == "loaded another":
            loader.set_epoch(2)
        count = 3 if way == "loaded more" else 2
        resuming = accelerator.skip_first_batches(loader, count)
        assert resuming is loader
        if way == "set after":
            loader.set_epoch(1)
        loader.dataset.read = []
        rest = plain(list(resuming))
        number = 2 if way == "loaded another" else 1
        answers[way] = (
            epochs[number][count:],
            rest,
            len(loader.dataset.read) == sum(len(indices) for indices, _ in rest),
            epochs[2] if number == 1 else None,
            plain(list(loader)) if number == 1 else None,
        )
        close(loader)
    return answers


def firsts(spec: Spec) -> list[int]:
    """Return the first index of each of three epochs."""
    _, loader = begin("ours", spec, {})
    found = [plain(list(loader))[0][0][0] for _ in range(3)]
    close(loader)
    return found


def saved_after_two(spec: Spec, folder: str) -> Any:
    """Return the indices of an epoch after its second batch, at which it is saved."""
    accelerator, loader = begin("ours", spec, {})
    batches = iter(loader)
    next(batches), next(batches)
    accelerator.save_state(folder)
    return [indices.tolist() for indices, _ in batches]


def held(spec: Spec) -> Any:
    """Return the indices of an epoch after its first batch, if a loop holds the second one and one that resumes."""
    _, loader = begin("ours", spec, {})
    batches = iter(loader)
    first, second = next(batches), next(batches)
    state = loader.state_dict(ahead=1)
    whole = [indices.tolist() for indices, _ in (first, second, *batches)]
    _, loader = begin("ours", spec, {})
    loader.load_state_dict(state)
    return whole[1:], [indices.tolist() for indices, _ in loader]


def loaded(spec: Spec, folder: str) -> Any:
    """Return the indices of an epoch after it was loaded."""
    accelerator, loader = begin("ours", spec, {})
    accelerator.load_state(folder)
    return [indices.tolist() for indices, _ in loader]
