"""Workers that come and go: shards of an epoch are leased over torch's own store, and acknowledged once.

`Leases` hands out shards; `LeaseSampler` makes batches of them for a loader. No server is needed.
"""

from fastload.elastic.leases import Leases
from fastload.elastic.sampler import LeaseSampler

__all__ = ["LeaseSampler", "Leases"]
