"""`Embedding`: a table on servers as a layer of a model. The loader's threads can pull its rows ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from fastload._kit.integers import positive
from fastload.parameters.client import PSClient, connect
from fastload.parameters.prefetched import Prefetched, PrefetchingCollate
from fastload.parameters.tables import TableInfo


class Embedding(nn.Module):
    """Rows of a table on servers, by their ids: int64[...] become float32[..., dim].

    Args:
        name: name of the table.
        dim: numbers in a row.
        client: client of the servers. None: a server in this process, with torch's SGD.
        rows: upper limit of ids, which must be less than this. None: any int64. Servers keep a row from its first push
            on.
        initializer: how a new row is drawn, as in `TableInfo`.
        kept_batches: maximum number of batches whose rows are kept. Give more than the loader has in flight, which is
            `prefetch_batches` plus `num_workers`. Memory: the distinct rows of each kept batch, twice if all of them
            are pushed.

    The layer has no parameters, so optimizers, DDP and `state_dict()` do not see it. In training, `forward` prepares
    gradients for `push`. In evaluation, and without gradients, it only pulls. A process must have only one `Embedding`
    for a table.

    Raises:
        ParametersError: the servers refuse a call or give no answer.
        IndexError: an id is outside `rows`.

    Examples:
        >>> table = fastload.parameters.Embedding("user", dim=4)
        >>> rows = table(torch.tensor([[3, 7], [3, 1]]))
        >>> rows.shape
        torch.Size([2, 2, 4])
        >>> rows.sum().backward()
        >>> table.push(0.05)
        >>> table.close()
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        client: PSClient | None = None,
        rows: int | None = None,
        initializer: str = "uniform",
        kept_batches: int = 64,
    ) -> None:
        super().__init__()
        positive("kept_batches", kept_batches)
        self.name, self.dim, self.rows = name, dim, rows
        info = TableInfo(name, dim, initializer)
        self._owns_client = client is None
        self._client = PSClient(connect()) if client is None else client
        self._client.push_embedding_table_infos([info])
        self._pulls = Prefetched(self._pull, kept=kept_batches)
        self._prefetches = False
        self._gradients: list[tuple[Tensor, Tensor]] = []  # appended to by threads of autograd

    def prefetching(self, key: Any, collate_fn: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
        """Return a `collate_fn` that also pulls the rows of a batch, on the loader's threads.

        Args:
            key: key of the ids in the batch, as in `batch[key]`, or a function that takes the batch and returns them.
            collate_fn: makes the batch, such as `torch.utils.data.default_collate`.

        The returned function gives the batch of `collate_fn`. `forward` finds the rows by the values of the ids, so the
        ids may be pinned or moved to a device. For several tables, nest the calls:
        `b.prefetching("b", a.prefetching("a", default_collate))`.
        """
        self._refuse_synchronous("prefetching")
        self._prefetches = True
        return PrefetchingCollate(self._pulls, key, collate_fn)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the row of each id, on the device of the ids."""
        pull = self._pulls.take(ids)
        assert pull.rows is not None
        rows = pull.rows.to(ids.device)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._add, pull.ids))  # type: ignore[no-untyped-call]
        return nn.functional.embedding(pull.places.to(ids.device).view(ids.shape), rows)

    def push(self, learning_rate: float | None = None) -> None:
        """Push the gradients of all backward passes since the last push, added up by id.

        Args:
            learning_rate: learning rate of this push. None: that of the servers. Servers with `scale_by_staleness` do
                not scale it, because `push` does not know the version of the rows.
        """
        self._refuse_synchronous("push")
        ids, gradients = self._taken()
        if len(ids):
            pushed = partial(self._client.push_rows, self.name, (ids, gradients), learning_rate)
            self._pulls.push(pushed)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Remove and return what `push` would push: ids and their gradients, for `PSClient.push_gradients`.

        This is for synchronous servers, for which dense parameters and tables must be in one push. It cannot be
        combined with `prefetching`, which must see each push.
        """
        if self._prefetches:
            raise ValueError(
                f"the rows of table {self.name!r} are prefetched, so push() must send its gradients. To push "
                "gradients yourself, do not use prefetching()"
            )
        return self._taken()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were not pushed. `zero_grad()` of the whole model does not call this."""
        self._gradients.clear()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Close the connection to the servers, unless the caller gave the client."""
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counts(self) -> dict[str, int]:
        """Return the numbers of batches that were prefetched, batches that `forward` pulled, and replaced rows."""
        return dict(self._pulls.counts)

    def _pull(self, ids: Tensor) -> Tensor:
        if self.rows is not None and len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.rows:
            raise IndexError(
                f"table {self.name!r} has {self.rows} rows, but ids from {ids[0]} to {ids[-1]} were given. Give ids "
                "below `rows`"
            )
        return self._client.pull_embedding_vectors(self.name, ids)

    def _add(self, ids: Tensor, rows: Tensor) -> None:
        """Record the gradient of rows at the end of a backward pass. Only the graph holds this hook."""
        assert rows.grad is not None
        self._gradients.append((ids, rows.grad))
        rows.grad = None

    def _taken(self) -> tuple[Tensor, Tensor]:
        taken, self._gradients = self._gradients, []
        if not taken:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.dim)
        ids, gradients = zip(*taken, strict=True)
        return torch.cat(ids), torch.cat([each.cpu() for each in gradients])

    def _refuse_synchronous(self, call: str) -> None:
        if self._client.synchronous:
            raise ValueError(
                f"{call}() works only with asynchronous servers, but these servers wait for several pushes. Push "
                "dense parameters and tables together: client.push_gradients(dense, {name: table.gradients()}, lr, "
                "versions)"
            )
