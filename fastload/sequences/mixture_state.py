"""What a loader's state holds of a mixture."""

from typing import Any, TypedDict

from fastload.order.state import compare


class MixtureState(TypedDict):
    """What a loader's state holds of a mixture."""

    step: int
    """The global step that the loader reads next, or is in the middle of."""
    part: int
    """Samples of that step that were delivered, on all ranks together."""
    epoch_began: int
    given: dict[str, int]
    given_then: dict[str, int]
    numbers: dict[str, int]
    """Samples of each source in that step."""
    lengths: dict[str, int]
    set_ids: dict[str, str | None]
    global_batch: int
    on_exhausted: str


def check_state(state: MixtureState, mixture: Any) -> None:
    """Raise StateError if a mixture with other arguments, or another source of the same name, saved `state`."""
    fields = "global_batch", "on_exhausted"
    pairs = {field: (state[field], getattr(mixture, field)) for field in fields}  # type: ignore[literal-required]
    for name in state["lengths"].keys() & mixture.lengths:
        pairs[f"length of {name!r}"] = state["lengths"][name], mixture.lengths[name]
        pairs[f"set_id of {name!r}"] = state["set_ids"].get(name), mixture.set_ids[name]
    for field, (theirs, ours) in pairs.items():
        remedy = "give Mixture the state's. A source with other samples needs another name"
        compare(field, theirs, ours, remedy)
