"""What a dataclass says about the options of the command that takes it. Nothing here needs a library of commands.

`fastload.cli` makes an option of each field: the type and the default are those of the field, and the help is the
docstring below it. An option is named like its field, or as an `Option` in the type says:

    batch_size: Annotated[Count, Option("-b --nbatch")] = 64
    \"\"\"Batch size per rank.\"\"\"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def options(kind: type[T]) -> type[T]:
    """Make a dataclass of keywords. It has no more than `__init__`, so that the command line starts fast."""
    return dataclass(kw_only=True, repr=False, eq=False)(kind)


class Option:
    """Marks a field's type with names of the option, and with limits of its values.

    Args:
        names: names with dashes. A word without dashes stands for the value in the help. Alone, it makes an argument.
        limits: keywords of click's type: of IntRange for int, FloatRange for float, Path for paths.
    """

    def __init__(self, names: str = "", **limits: Any) -> None:
        self.names, self.limits = names, limits


Count = Annotated[int, Option(min=1)]
Index = Annotated[int, Option(min=0)]
Amount = Annotated[float, Option(min=0)]
Port = Annotated[int, Option(min=0, max=65535)]
Milliseconds = Annotated[float, Option(min=0, max=3_600_000)]
Seed = Annotated[int, Option(min=0, max=2**63 - 1)]  # torch takes 64 bits, and adds ranks
Threads = Annotated[int, Option(min=0, max=1024)]
File = Annotated[Path, Option(dir_okay=False)]
Folder = Annotated[Path, Option(file_okay=False)]
ExistingFile = Annotated[Path, Option(exists=True, dir_okay=False)]
ExistingFolder = Annotated[Path, Option(exists=True, file_okay=False)]
