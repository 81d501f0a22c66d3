"""The state of a loader, as a value: what was delivered, and what another loader must have in common to load it.

`Order.state` creates it.
"""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self, TypeVar

from fastload._kit.annotations import signature
from fastload._kit.user_errors import shown
from fastload.errors import StateError

VERSION = 4
ALIKE = 3
"""An earlier version, in which the states of map-style datasets had the same fields."""
FIRST = ("version", "kind", "epoch", "batches", "position", "ended")
"""The fields that a printed state begins with. The long ones are declared last."""
T = TypeVar("T")
LATER: dict[str, Any] = {}
"""Fields that a state of this version may lack, and what they then are: each field that is new since the first one."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The fields that the states of all loaders have. All are JSON values."""

    version: int = VERSION
    kind: str = ""
    seed: int | None
    world_size: int
    global_batch: int | None
    drop_last: bool
    stream_seed: int | None = None
    """None until an epoch has begun."""
    epoch: int
    sampler_epoch: int | None
    """The sampler's own number of the epoch, if it has one."""
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, those of `FIRST` before the others. The values are not copied."""
        fields = vars(self)
        return {name: fields[name] for name in FIRST if name in fields} | fields

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the state that `value` holds. Raise `StateError` if a field is missing."""
        if not isinstance(value, dict) or "version" not in value:
            raise StateError(
                f"this is not the state of a fastload loader: {value!r:.100}. Pass what state_dict() returned"
            )
        if value["version"] == ALIKE and cls.kind == SampledState.kind:
            value = {**value, "version": VERSION}
        for field, ours in (("version", VERSION), ("kind", cls.kind)):
            compare(field, value.get(field), ours)
        return read_fields(cls, value)


@dataclass(frozen=True, kw_only=True)
class SampledState(State):
    """The state of a loader of a map-style dataset."""

    kind: str = "map-style"
    samples: int | None
    sampler: str
    sampler_length: int | None = None
    generators: int
    sampler_seed: int | None = None
    shuffle: bool | None = None
    ends: str | None = None
    window: int | None = None
    run: int | None = None
    set_id: str | None
    """The dataset's attribute `set_id`, if it has one. The same id means the same samples in the same order."""
    batches: int = 0
    position: int = 0
    """The end of the last of these batches, in the order of all ranks."""
    ahead: list[int]
    """Ordinals of the batches that were delivered before earlier ones (in_order=False)."""
    ahead_on_rank: int | None = None
    checksum: int | None = None
    """Checksum of the indices of these batches, on one rank; None if the sampler draws nothing."""
    checksum_on_rank: int | None = None
    sampler_state: Any = None
    """What the sampler's `state_dict()` returned before `iter(sampler)`, or after the end of the epoch."""
    draws: list[dict[str, Any]] | None = None
    """The random states before `iter(sampler)` and before its first index. After the end of the epoch, only those that
    the next epoch begins with. None if the sampler draws nothing."""


@dataclass(frozen=True, kw_only=True)
class IterableState(State):
    """The state of a loader of an iterable dataset."""

    kind: str = "iterable"
    rank: int
    """Whose samples these are: each rank reads others."""
    workers: int
    turn: int = 0
    """The lane of the next batch."""
    lanes: list[dict[str, Any]]
    """A dict for each worker's copy of the dataset:

    - samples: those taken in this epoch, including those that raised;
    - state: what its `state_dict()` returned, or None if it has none;
    - ended: whether it has ended;
    - seen: the checksum of its first samples. If they are read again and it differs, the loop warns;
    - draws: see `Stream.pass_state`.
    """


def batches_of(state: dict[str, Any]) -> int:
    """Return how many batches were delivered in the epoch of a state."""
    ranks = state.get("world_size", 1)
    size = (state.get("global_batch") or ranks) // ranks
    lanes = sum(-(-lane["samples"] // size) for lane in state.get("lanes", []))
    return int(state.get("batches", lanes))


_REMEDIES = {
    "version": "use the version of fastload that made the state",
    "kind": "load it into a loader of the same kind of dataset",
    "seed": "make the loader with the state's seed",
    "samples": "load it with the dataset that the state was made on",
    "set_id": "load it with the set that the state was made on: this set was written again, or has other parts",
    "sampler": "give the loader the same shuffle, or the same kind of sampler",
    "sampler_length": "give the loader the sampler that the state was made with",
    "generators": "give the loader or its sampler a generator if, and only if, the state's had one",
    "sampler_seed": "give the sampler the state's seed",
    "shuffle": "give the sampler the state's shuffle",
    "ends": "give the sampler the state's ends",
    "window": "give the sampler the state's window and run",
    "run": "give the sampler the state's window and run",
    "drop_last": "make the loader with the state's drop_last",
    "world_size": "use the same number of ranks: only RankSampler and DistributedSampler, with batches of a fixed "
    "size, can resume with another number",
    "rank": "let each rank save and load its own state of a stream: with torch.distributed.checkpoint, under a key "
    'such as f"loader_{rank}". If ranks read the same samples, give the dataset partitioned_by_rank=True, and the rank '
    "and world_size of its part",
    "global_batch": "choose the batch size so that batch size x ranks is the state's global batch",
    "workers": "make the loader with the state's num_workers",
}
_MADE_BY = {
    "RankSampler": "shuffle=True with a seed",
    "RandomSampler": "shuffle=True without a seed",
    "SequentialSampler": "shuffle=False",
}


def check(state: State, ours: State, *, rank: int, any_world: bool) -> None:
    """Raise `StateError` if a loader with the state `ours` cannot load `state`. Name field, both values and remedy.

    `any_world` says whether the loader can resume what another number of ranks began.
    """
    for field in _REMEDIES:
        if not (field == "world_size" and any_world):
            compare(field, getattr(state, field, None), getattr(ours, field, None))
    if not isinstance(state, SampledState) or not state.ahead:
        return
    if (state.ahead_on_rank, state.world_size) != (rank, ours.world_size):
        raise StateError(
            f"ahead: the state has batches {state.ahead} delivered out of order on rank {state.ahead_on_rank} of "
            f"{state.world_size}, but this loader is on rank {rank} of {ours.world_size}. Load the state that the "
            "same rank saved"
        )


def compare(field: str, theirs: Any, ours: Any, remedy: str = "") -> None:
    """Raise `StateError` with the field and both values if they differ."""
    if theirs != ours:
        raise StateError(
            f"{field}: the state has {_shown(field, theirs)}, this loader {_shown(field, ours)}; "
            f"{remedy or _REMEDIES[field]}"
        )


def _shown(field: str, value: Any) -> str:
    """Return `value` as a string. After a sampler's name add the loader's arguments that give that sampler."""
    made_by = _MADE_BY.get(value) if field == "sampler" else None
    return f"{value!r} (or {made_by})" if made_by else repr(value)


def read_fields(cls: Callable[..., T], value: dict[str, Any]) -> T:
    """Return the dataclass, or the dict, that `value` holds. Raise `StateError` if a field is missing."""
    own: Any = cls
    names = [f.name for f in fields(own)] if is_dataclass(own) else [*own.__annotations__]
    value = LATER | value
    for field in names:
        if field not in value:
            raise StateError(
                f"{field}: the state has no such field. The state is incomplete: load another one"
            )
    return cls(**copy.deepcopy({field: value[field] for field in names}))


def keeps_state(source: Any) -> bool:
    """Return whether `source.state_dict()` and `source.load_state_dict(state)` can be called.

    Methods of these names that need more arguments are another protocol: LitData's and MosaicML's do.
    """
    try:
        signature(source.state_dict).bind()
        signature(source.load_state_dict).bind(None)
    except (AttributeError, TypeError):
        return False
    except ValueError:  # it is written in C, and does not tell its signature
        return hasattr(source, "load_state_dict")
    return True


def load_into(source: Any, state: Any, field: str) -> None:
    """Load the state of a user's dataset, iterator or sampler. Raise `StateError` with the field if that fails."""
    try:
        source.load_state_dict(state)
    except Exception as exc:
        raise StateError(
            f"{field}: {type(source).__name__} cannot load its saved state, {shown(state):.100} ({type(exc).__name__}: "
            f"{shown(exc, str)}). Load the state with the dataset or sampler that made it"
        ) from exc


def as_int(value: Any) -> int | None:
    """Return `value` as an int, or None if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def known_length(it: Any) -> int | None:
    """Return `len(it)`, or None if that raises. Torch never calls it, so it may raise."""
    try:
        return len(it)
    except Exception:
        return None
