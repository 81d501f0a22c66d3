"""Parameters on servers: dense ones and tables of rows that do not fit, for workers that come and go.

from fastload.parameters import PSClient, connect

client = PSClient(connect(None))                  # one server in this process, without a socket
client = PSClient(connect("file:///shared/run7")) # those of `fastload parameters serve --store /shared/run7`

A worker:
    client.py       connect, PSClient: the calls           partition.py    which server has what: pure
    session.py      one client with all servers            link.py         with one, over broken connections
    embedding.py    a table as a layer                     prefetched.py   rows pulled ahead, never stale
Between them:
    transport.py    stubs: how clients reach servers       flight.py       over Arrow Flight
    wire.py         values with tensors as bytes           gradients.py    what a push has for a server
A server:
    server.py       Server: what calls do                  serve.py        as a process
    parameters.py   those that it has                      optimizer.py    torch's rules, for tensors and rows
    tables.py       rows by their ids                      row_index.py    places of ids: a hash table in NumPy
    synchronous.py  pushes become steps                    journal.py      their order, as server 0 decides it
    checkpoint.py   files
"""

from fastload.parameters.client import PSClient, connect
from fastload.parameters.embedding import Embedding
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.server import Server
from fastload.parameters.tables import TableInfo
from fastload.parameters.transport import InProcess, Stub

__all__ = [
    "Embedding",
    "InProcess",
    "Optimizer",
    "PSClient",
    "Server",
    "Stub",
    "TableInfo",
    "connect",
]
