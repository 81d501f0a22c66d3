"""Parameters on servers, dense ones and large tables of rows, for workers that come and go.

from fastload.parameters import PSClient, connect

client = PSClient(connect(None))                  # one server in this process, without a socket
client = PSClient(connect("file:///shared/run7")) # servers of `fastload parameters serve --store /shared/run7`

A worker:
    client.py       connect, PSClient: the calls
    servers.py      one client and all its servers         partition.py    which server has which parameter
    embedding.py    a table as a layer                     prefetched.py   rows pulled ahead, never stale
Between them:
    transport.py    stubs: how clients reach servers       flight.py       calls over Arrow Flight
    wire.py         values with tensors as bytes           gradients.py    the gradients of a push for one server
A server:
    server.py       Server: the effects of calls           serve.py        a server as a process
    parameters.py   the parameters of a server             optimizer.py    torch's rules, for tensors and rows
    tables.py       rows by their ids                      checkpoint.py   files of checkpoints
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
