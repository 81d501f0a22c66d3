"""Run the graph of `test_executors.py` on an executor of Dask or mpi4py: on_executor.py KIND FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.flow.test_executors import shows_order_failures_and_resume

if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "dask":
        from distributed import Client

        with Client(n_workers=1, threads_per_worker=2, dashboard_address=None) as client:
            shows_order_failures_and_resume(client.get_executor(), folder)
    else:
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor() as executor:
            shows_order_failures_and_resume(executor, folder)
