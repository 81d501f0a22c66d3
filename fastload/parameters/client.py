"""`connect` and `PSClient`: the calls of a worker, with the names of ElasticDL's design for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fastload.distributed.folder_store import FolderStore
from fastload.parameters.gradients import NEWEST, Gradients, Rows, expect_finite
from fastload.parameters.optimizer import checked_rate
from fastload.parameters.partition import merged, owners, string_to_id
from fastload.parameters.server import Server
from fastload.parameters.servers import Servers
from fastload.parameters.tables import TableInfo
from fastload.parameters.transport import Answer, InProcess, Stub, address_in, servers_in

Where = None | Server | Store | str | Sequence[Server | str]
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by name: a dict, or pairs such as `model.named_parameters()`."""
RowGradients = Mapping[str, tuple[Tensor, Tensor] | Tensor]
"""For each table: ids with a gradient for each, or a sparse gradient as `nn.Embedding(sparse=True)` makes it."""


def connect(
    where: Where = None, *, token: str = "", authority: bytes | None = None, wait_s: float = 60.0
) -> list[Stub]:
    """Return a stub for each server, for `PSClient`.

    Args:
        where: None: a new server in this process. A `Server`, an address such as "grpc://node7:7000" or
            "grpc+tls://node7:7000", or a list of these, in the order of the servers. Or the store into which
            `fastload parameters serve` writes addresses: "file:///PATH" for the folder of its --store, or any
            `torch.distributed.Store`.
        token: token of the servers. "": the content of the file `$FASTLOAD_TOKEN_FILE`, if it is set. A file that
            other users can read is a UsageError.
        authority: certificate, in PEM, of the authority that signed the servers' certificates. None: the content of
            the file `$FASTLOAD_TLS_CA`, if it is set.
        wait_s: seconds to wait for the servers to write their addresses.

    Connections are made when they are needed.

    Examples:
        >>> client = fastload.parameters.PSClient(fastload.parameters.connect())
        >>> client.close()
    """

    def stub(place: Server | str | Callable[[], str]) -> Stub:
        if isinstance(place, Server):
            return InProcess(place)
        # Imported here, because servers of this process work without Arrow.
        from fastload.parameters.flight import FlightStub

        return FlightStub(place, token=token, authority=authority)

    if isinstance(where, str) and where.startswith("file://"):
        where = FolderStore(where.removeprefix("file://"))
    if isinstance(where, Store):
        number = servers_in(where, wait_s)
        return [stub(partial(address_in, where, i)) for i in range(number)]
    if where is None or isinstance(where, Server | str):
        where = [Server() if where is None else where]
    return [stub(place) for place in where]


class PSClient:
    """The parameters of a model, on servers.

    Args:
        ps_stubs: what `connect` returns, in the order of the servers.
        patience_s: seconds to wait for servers that do not listen yet, and for progress of synchronous servers.

    Several threads may make calls. Pulls run in parallel, and pushes one after another. A call is sent to all servers
    at once. If a connection breaks, it raises: a push may have been applied, but only once.

    Every returned tensor belongs to the caller, is on the CPU, and begins at a multiple of 64 bytes.

    Raises:
        ParametersError: a server refuses a call or gives no answer.
        ParametersLostError: a server has restarted: resume all servers and workers from the checkpoint.

    Examples:
        >>> client = fastload.parameters.PSClient(fastload.parameters.connect())
        >>> accepted = client.push_dense_parameters(model.named_parameters(), 0, 0)
        >>> values, versions = client.pull_dense_parameters([0], [-1])
        >>> client.close()
    """

    def __init__(self, ps_stubs: Sequence[Stub], *, patience_s: float = 60.0) -> None:
        if not ps_stubs:
            raise ValueError("ps_stubs is empty: a client needs one server or more")
        self.ps_stubs = list(ps_stubs)
        self.ps_num = len(self.ps_stubs)
        self.parameter_to_ps: dict[str, int] = {}
        self.ps_to_parameter: dict[int, list[str]] = {}
        self._servers = Servers(self.ps_stubs, patience_s=patience_s)

    @property
    def synchronous(self) -> bool:
        """True if the servers wait for several pushes before each step."""
        return self._servers.grads_to_wait is not None

    # ---- dense parameters ----

    def partition_dense_parameters(self, names: Iterable[str]) -> None:
        """Assign each dense parameter to a server, by `string_to_id`. The other calls do this for new names."""
        for name in names:
            if name not in self.parameter_to_ps:
                number = self.parameter_to_ps[name] = string_to_id(name, self.ps_num)
                self.ps_to_parameter.setdefault(number, []).append(name)

    def push_dense_parameters(self, parameters: Named, ps_id: int, version: int) -> bool:
        """Send server `ps_id` the first values of its own parameters. Return True if it accepted them.

        The server accepts the values of the first worker only.
        """
        values = dict(parameters)
        self.partition_dense_parameters(values)
        own = {name: t for name, t in values.items() if self.parameter_to_ps[name] == ps_id}
        call = ps_id, "initialise", {"values": own, "version": int(version)}
        return bool(self._servers.ask([call])[0]["taken"])

    def pull_dense_parameters(
        self, ps_ids: Iterable[int], model_versions: list[int]
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Return the parameters of all servers with newer versions, and the servers without parameters so far.

        Args:
            model_versions: for each server, the version that the caller has, or -1 for none. This list is updated.
        """
        self._expect_one_for_each_server(model_versions)
        numbers = list(ps_ids)
        calls = [(i, "pull", {"version": int(model_versions[i])}) for i in numbers]
        values: dict[str, Tensor] = {}
        uninitialised = []
        for i, answer in zip(numbers, self._servers.ask(calls), strict=True):
            if not answer["initialised"]:
                uninitialised.append(i)
            else:
                values |= answer["values"]
                model_versions[i] = answer["version"]
        return values, uninitialised

    def pull_variable(self) -> dict[str, Tensor]:
        """Return the dense parameters of all servers."""
        return self.pull_dense_parameters(range(self.ps_num), [-1] * self.ps_num)[0]

    # ---- tables ----

    def push_embedding_table_infos(
        self, infos: Iterable[TableInfo | tuple[str, int] | tuple[str, int, str]]
    ) -> None:
        """Create tables, each a `TableInfo` or (name, dim, initializer). Existing tables stay unchanged."""
        made = [info if isinstance(info, TableInfo) else TableInfo(*info) for info in infos]
        call = "add_tables", {"infos": [asdict(info) for info in made]}
        self._servers.ask((i, *call) for i in range(self.ps_num))

    def pull_embedding_vectors(self, layer_name: str, embedding_ids: Tensor) -> Tensor:
        """Return the row of each id, [n, dim], in their order. Ids may repeat. A missing row has its first value."""
        ids = flat_ids(embedding_ids)
        places = _places(ids, self.ps_num)
        needed = [i for i, own in enumerate(places) if len(own)] or [0]
        calls = [(i, "rows", {"table": layer_name, "ids": ids[places[i]]}) for i in needed]
        answers: list[Tensor] = [answer["rows"] for answer in self._servers.ask(calls)]
        if self.ps_num == 1:
            return answers[0]
        found = torch.empty(len(ids), answers[0].shape[1])
        for i, rows in zip(needed, answers, strict=True):
            found.index_copy_(0, places[i], rows)
        return found

    def set_embedding_vectors(self, layer_name: str, embedding_ids: Tensor, values: Tensor) -> None:
        """Set the row of each id, such as those of a trained `nn.Embedding`. The state of the optimizer stays.

        Call this before the training loop, because prefetched rows do not change. Call `checkpoint` afterwards, or a
        restart loses these rows.

        Args:
            embedding_ids: distinct ids.
            values: their rows, [n, dim].
        """
        ids, rows = flat_ids(embedding_ids), values.detach().cpu().float()
        distinct = len(np.unique(ids.numpy()))
        if distinct != len(ids) or rows.ndim != 2 or len(rows) != len(ids):
            raise ValueError(
                f"set_embedding_vectors takes n distinct ids and values [n, dim], got {len(ids)} ids, {distinct} "
                f"distinct, and values {list(rows.shape)}"
            )
        self._servers.ask(
            (i, "set_rows", {"table": layer_name, "ids": ids[own], "values": rows[own]})
            for i, own in enumerate(_places(ids, self.ps_num))
        )

    # ---- gradients ----

    def push_gradients(
        self,
        grads: Named,
        edl_grads: RowGradients,
        learning_rate: float | None,
        model_versions: Sequence[int],
    ) -> tuple[bool, int]:
        """Push gradients to all servers. Return (accepted, newest version of any server).

        Asynchronous servers accept all gradients. Synchronous ones reject gradients that are too old: then pull,
        compute and push again. Gradients of one id add up. This does not change its arguments, and the caller may
        change them after the call.

        Args:
            grads: gradients of dense parameters. Parameters whose gradient is None are left out.
            edl_grads: gradients of rows, by table.
            learning_rate: learning rate of this push. None: that of the servers.
            model_versions: for each server, the version with which the gradients were computed.

        Raises:
            ParametersError: a gradient has NaN or infinite numbers. Then no server has changed anything.
        """
        self._expect_one_for_each_server(model_versions)
        tables = {name: _summed(given) for name, given in edl_grads.items()}
        return self._push(_dense(grads), tables, learning_rate, model_versions, fresh=False)[:2]

    def push_rows(
        self,
        layer_name: str,
        gradients: tuple[Tensor, Tensor] | Tensor,
        learning_rate: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Push gradients of rows to asynchronous servers. Return the distinct ids, ascending, and their new rows.

        Servers do not scale the learning rate by staleness, because the versions of the rows are unknown.
        """
        ids, sums = _summed(gradients)
        never = [NEWEST] * self.ps_num
        *_, answers = self._push({}, {layer_name: (ids, sums)}, learning_rate, never, fresh=True)
        found = torch.empty(sums.shape)
        for own, answer in zip(_places(ids, self.ps_num), answers, strict=True):
            if len(own):
                found[own] = answer["fresh"][layer_name]
        return ids, found

    def _push(
        self,
        dense: Mapping[str, Tensor],
        tables: Mapping[str, Rows],
        learning_rate: float | None,
        versions: Sequence[int],
        *,
        fresh: bool,
    ) -> tuple[bool, int, list[Answer]]:
        self.partition_dense_parameters(dense)
        lr = checked_rate(learning_rate)
        if self.ps_num > 1:  # one server may apply its part before another refuses its own
            for name, (_, gradients) in tables.items():
                expect_finite(name, gradients)
            for name, gradient in dense.items():
                expect_finite(name, gradient)
        places = {name: _places(ids, self.ps_num) for name, (ids, _) in tables.items()}
        parts = []
        for i in range(self.ps_num):
            # Server 0 decides for all synchronous ones.
            version = min(versions) if self.synchronous else versions[i]
            own = {k: v.detach() for k, v in dense.items() if self.parameter_to_ps[k] == i}
            rows = {
                name: (ids[mine], gradients[mine])
                for name, (ids, gradients) in tables.items()
                if len(mine := places[name][i])
            }
            parts.append(Gradients(version=int(version), lr=lr, dense=own, rows=rows))
        accepted, answers = self._servers.push(parts, fresh=fresh)
        return accepted, max(answer["version"] for answer in answers), answers

    def _expect_one_for_each_server(self, model_versions: Sequence[int]) -> None:
        if len(model_versions) != self.ps_num:
            raise ValueError(
                f"model_versions must have {self.ps_num} numbers, one for each server, got {model_versions}"
            )

    # ---- the servers ----

    def checkpoint(self) -> int:
        """Have all servers save a checkpoint in their folder. Return its version.

        Raises:
            ParametersError: the servers have no folder.
        """
        return self._servers.checkpoint()

    def close(self) -> None:
        """Close the connections."""
        for stub in self.ps_stubs:
            stub.close()


def flat_ids(ids: Tensor) -> Tensor:
    """Return ids as int64[n] on the CPU. Raise TypeError unless they are whole numbers."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be whole numbers, got {ids.dtype}")
    return ids.detach().cpu().reshape(-1).long().contiguous()


def _dense(grads: Named) -> dict[str, Tensor]:
    """Return the gradients that are not None. Raise TypeError if one is sparse."""
    dense = {name: gradient for name, gradient in dict(grads).items() if gradient is not None}
    for name, gradient in dense.items():
        if gradient.layout != torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is {gradient.layout}, but dense parameters need dense gradients. Convert "
                "it with to_dense(), or make a table of the parameter and give the gradient in edl_grads"
            )
    return dense


def _summed(given: tuple[Tensor, Tensor] | Tensor) -> Rows:
    """Return the distinct ids in ascending order, and the sum of each id's gradients."""
    if isinstance(given, Tensor):
        if given.layout != torch.sparse_coo or given.sparse_dim() != 1:
            raise TypeError("a gradient of rows is (ids, gradients), or a sparse tensor of rows")
        ids, values = given._indices()[0], given._values()
    else:
        ids, values = given
    ids = flat_ids(ids)
    values = values.detach().cpu().reshape(-1, values.shape[-1])
    if len(ids) != len(values):
        raise ValueError(
            f"got {len(ids)} ids, but {len(values)} gradients of rows. Give one gradient for each id"
        )
    return merged(ids, values.float())  # a sum in float16 may overflow


def _places(ids: Tensor, number: int) -> list[Tensor]:
    """Return for each server the places of its own ids."""
    owner = owners(ids, number)
    return [(owner == i).nonzero()[:, 0] for i in range(number)]
