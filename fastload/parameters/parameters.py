"""`Parameters`: the parameters of one server. Only `apply` changes them by gradients. Not thread-safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters.gradients import Gradients, expect_finite
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.partition import owners, string_to_id
from fastload.parameters.tables import Table, TableInfo

_LEARNT = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""The dtypes of parameters that optimizers change."""


class Parameters:
    """Dense parameters by name and tables by name, with the state of the optimizer."""

    def __init__(self, optimizer: Optimizer, *, seed: int = 0) -> None:
        self._optimizer = optimizer
        self._seed = seed
        self.dense: dict[str, Tensor] = {}
        self._state: dict[str, dict[str, Tensor]] = {}  # of the optimizer, by dense parameter
        self.tables: dict[str, Table] = {}

    def add_dense(self, values: Mapping[str, Tensor]) -> None:
        """Add the parameters that do not exist yet."""
        new = {name: value.detach().clone() for name, value in values.items()}
        self._state |= {name: self._optimizer.state_of(value) for name, value in new.items()}
        self.dense |= new

    def add_table(self, info: TableInfo) -> None:
        """Add a table unless it exists. Raise ParametersError if a different table has its name."""
        there = self.tables.get(info.name)
        if there is None:
            self.tables[info.name] = Table(info, self._optimizer, seed=self._seed)
        elif there.info != info:
            raise ParametersError(
                f"table {info.name!r} already exists with {there.info}, but was requested with {info}. Request the "
                "same everywhere, or choose another name"
            )

    def table(self, name: str) -> Table:
        """Return the table of this name. Raise ParametersError if it does not exist."""
        if name not in self.tables:
            known = ", ".join(map(repr, self.tables)) or "none"
            raise ParametersError(
                f"table {name!r} does not exist. The tables are {known}. Call push_embedding_table_infos first"
            )
        return self.tables[name]

    def check(self, gradients: Gradients) -> None:
        """Raise ParametersError if these gradients cannot be applied, all of them."""
        for name, gradient in gradients.dense.items():
            if name not in self.dense:
                raise ParametersError(
                    f"dense parameter {name!r} does not exist on this server. Call push_dense_parameters first"
                )
            parameter = self.dense[name]
            if gradient.shape != parameter.shape:
                raise ParametersError(
                    f"the gradient of {name!r} has the shape {tuple(gradient.shape)}, but the parameter has the shape "
                    f"{tuple(parameter.shape)}. Give all workers the same model"
                )
            if not {gradient.dtype, parameter.dtype} <= _LEARNT:
                raise ParametersError(
                    f"the gradient of {name!r} is {gradient.dtype}, but the parameter is {parameter.dtype}. Both must "
                    "be floating-point numbers"
                )
            expect_finite(name, gradient.to(parameter.dtype))
        for name, (ids, values) in gradients.rows.items():
            self.table(name).check(ids, values)
            expect_finite(name, values.float())

    def apply(self, gradients: Gradients, *, divisor: int = 1) -> None:
        """Apply gradients that `check` has accepted. The learning rate is divided by `divisor`."""
        lr = (self._optimizer.lr if gradients.lr is None else gradients.lr) / divisor
        # First: memory for new rows may be missing.
        places = {name: self.tables[name].places(ids) for name, (ids, _) in gradients.rows.items()}
        for name, gradient in gradients.dense.items():
            value = self.dense[name]
            self._optimizer.step(value, gradient.to(value.dtype), self._state[name], lr)
        for name, (_, values) in gradients.rows.items():
            self.tables[name].apply(places[name], values.float(), lr)

    def contents(self) -> dict[str, Any]:
        """Return everything as plain values and tensors, which are valid until the next change."""
        tables = [
            {"info": asdict(table.info), "columns": table.columns()}
            for table in self.tables.values()
        ]
        return {
            "optimizer": asdict(self._optimizer),
            "dense": dict(self.dense),
            "state": {name: dict(state) for name, state in self._state.items()},
            "tables": tables,
        }

    def add_contents(self, contents: Mapping[str, Any], *, number: int, of: int) -> None:
        """Add those parts of another server's `contents` that belong to server `number` of `of`."""
        if contents["optimizer"]["name"] != self._optimizer.name:
            raise ValueError(
                f"the checkpoint was made with the optimizer {contents['optimizer']['name']!r}, but this server has "
                f"{self._optimizer.name!r}. Use the same optimizer"
            )
        dense = {k: v for k, v in contents["dense"].items() if string_to_id(k, of) == number}
        self.add_dense(dense)
        for name in dense:
            saved_state = contents["state"].get(name, {})
            self._state[name] |= {key: value.clone() for key, value in saved_state.items()}
        for saved in contents["tables"]:
            self.add_table(TableInfo(**saved["info"]))
            columns = saved["columns"]
            own = owners(columns["id"], of) == number
            mine = {name: column[own] for name, column in columns.items()}
            self.tables[saved["info"]["name"]].add(mine)
