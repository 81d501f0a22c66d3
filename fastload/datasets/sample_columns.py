"""The columns of a table that form a sample, and its containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class SampleColumns:
    """The columns of a sample: those of the data, and that of the label.

    Args:
        data: one name: the data is its value. Several: a tuple of values. None: a dict of all of `known` but `label`.
        label: the column that follows the data: a sample is `(data, label)`. None: a sample is the data.
        known: the columns of the table.
        where: the table's name, for the error.

    Attributes:
        data_names: the columns of the data.
        names: the columns to read, each once.

    Raises KeyError if a name is not known.
    """

    def __init__(
        self,
        data: str | Sequence[str] | None,
        label: str | None,
        *,
        known: Sequence[str],
        where: str,
    ) -> None:
        self.data = data if isinstance(data, str) else None if data is None else tuple(data)
        self.label = label
        if self.data is None:
            self.data_names = tuple(name for name in known if name != label)
        else:
            self.data_names = (self.data,) if isinstance(self.data, str) else self.data
        labels = () if label is None else (label,)
        self.names = tuple(dict.fromkeys((*self.data_names, *labels)))
        for name in self.names:
            if name not in known:
                raise KeyError(f"{where} has no column {name!r}. Its columns are {list(known)}")

    def data_of(self, values: Mapping[str, Any]) -> Any:
        """Return the data of a sample, given the values by name."""
        if self.data is None:
            return {name: values[name] for name in self.data_names}
        found = tuple(values[name] for name in self.data_names)
        return found[0] if isinstance(self.data, str) else found

    def sample(self, values: Mapping[str, Any]) -> Any:
        """Return a sample, given the values by name."""
        data = self.data_of(values)
        return data if self.label is None else (data, values[self.label])

    def leaves(self, sample: Any) -> list[tuple[str, Any]]:
        """Return the leaves of a sample, each with the name of its column. A column may occur twice."""
        data, labels = (
            (sample, []) if self.label is None else (sample[0], [(self.label, sample[1])])
        )
        if self.data is None:
            return [*data.items(), *labels]
        values = (data,) if isinstance(self.data, str) else data
        return [*zip(self.data_names, values, strict=True), *labels]
