"""What a loader's state holds of a mixture."""

from typing import Any, TypedDict

from fastload.errors import StateError
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
    changes: list[Any]
    """Empty. Earlier versions had the changes by `Mixture.set_weights` here."""
    global_batch: int
    by: str
    on_exhausted: str


def check_state(state: MixtureState, mixture: Any) -> None:
    """Raise StateError if a mixture with other arguments, or another source of the same name, saved `state`."""
    if state["changes"]:
        raise StateError(
            f"changes: the state has weights that `set_weights` changed, {state['changes']!r:.200}, which this version "
            "does not read. Give Mixture a function of the global step that returns these weights, and empty the list "
            "`changes` in the state"
        )
    compare("by", state["by"], "quota", "this version draws no sources. Begin with a new Mixture")
    fields = "global_batch", "on_exhausted"
    pairs = {field: (state[field], getattr(mixture, field)) for field in fields}  # type: ignore[literal-required]
    for name in state["lengths"].keys() & mixture.lengths:
        pairs[f"length of {name!r}"] = state["lengths"][name], mixture.lengths[name]
        pairs[f"set_id of {name!r}"] = state["set_ids"].get(name), mixture.set_ids[name]
    for field, (theirs, ours) in pairs.items():
        remedy = "give Mixture the state's. A source with other samples needs another name"
        compare(field, theirs, ours, remedy)
