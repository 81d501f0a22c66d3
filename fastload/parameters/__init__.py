"""Parameters on servers: dense ones and tables of rows that do not fit, for workers that come and go.

from fastload.parameters import PSClient, connect

client = PSClient(connect(None))                  # one server in this process, without a socket
client = PSClient(connect("file:///shared/run7")) # those of `fastload parameters serve --store /shared/run7`

partition.py   which server has what: pure             optimizer.py   torch's rules, for tensors and for rows
tables.py      rows by their ids                       row_index.py   places of ids: a hash table in NumPy
part.py        the parameters of one server            server.py      what calls do to them
steps.py       synchronous pushes: pure                journal.py     their order, as server 0 decides it
checkpoint.py  files                                   wire.py        values with tensors as bytes
transport.py   how clients reach servers               flight.py      over Arrow Flight
link.py        one client's way to one server          pushes.py      to all, also to one that restarts
client.py      PSClient                                serve.py       a server as a process
embedding.py   a table as a layer                      prefetched.py  rows pulled ahead, never stale
"""

from fastload.parameters.client import PSClient
from fastload.parameters.embedding import Embedding
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.server import Server
from fastload.parameters.tables import TableInfo
from fastload.parameters.transport import InProcess, Stub, connect

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
