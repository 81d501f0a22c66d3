"""Sets of columns: prepared once, mapped by every process of a node, without a server. Needs the extra `arrow`.

`put` writes data as a set, `prepare` builds a set from many sources on any executor, and `get` opens a set as a
map-style dataset. `features` and `predictions` run a model over a dataset and store its outputs as a set. By default,
sets lie in shared memory. With `root=`, or with a path as name, they can lie on a disk.
"""

from typing import TYPE_CHECKING, Any

from fastload.errors import needs

try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise needs("fastload.store", "pyarrow", "arrow", error) from error

if TYPE_CHECKING:
    from fastload.store.backbones import backbone
    from fastload.store.dataset import SetDataset
    from fastload.store.features_and_predictions import features, predictions
    from fastload.store.preparation import Prepared
    from fastload.store.preparing import prepare
    from fastload.store.read import get
    from fastload.store.write import put

__all__ = [
    "Prepared",
    "SetDataset",
    "backbone",
    "features",
    "get",
    "predictions",
    "prepare",
    "put",
]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:
        """Load a public name at its first use. Importing torch takes seconds: `fastload set ls` does without."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastload.store import backbones, features_and_predictions, preparing, read, write

        homes = (backbones, features_and_predictions, preparing, read, write)
        return next(vars(home)[name] for home in homes if name in vars(home))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
