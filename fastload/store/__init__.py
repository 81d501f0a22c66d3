"""Sets of columns: prepared once, mapped by every process of a node, without a server. Needs the extra `arrow`.

`put` writes data as a set, `prepare` builds a set from many sources on any executor, and `get` opens a set as a
map-style dataset. `features` and `predictions` run a model over a dataset and store its outputs as a set. By default,
sets lie in shared memory. With `root=`, or with a path as name, they can lie on a disk.
"""

try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'fastload.store needs pyarrow, which is not installed: pip install "fastload[arrow]"',
        name=error.name,
    ) from error

from fastload.store.backbone import backbone
from fastload.store.dataset import SetDataset
from fastload.store.features import features
from fastload.store.predictions import predictions
from fastload.store.preparation import Prepared
from fastload.store.prepare import prepare
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
