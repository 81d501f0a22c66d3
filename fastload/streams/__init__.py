"""Streams that resume exactly: shards in an order that depends on seed and epoch, and steps over their samples.

    chain         a stream, and the steps that hold no samples
    blocks        steps that hold samples, a block at a time
    applied       a step that a generator of the user's takes
    passes        one reader's way through an epoch, and the keys of samples
    shards        the source: shards of files, dealt to readers
    formats       how a shard is read from any of its samples on
    packed        texts, packed into rows
    mixed         several streams in given shares
    adapters      streams of Hugging Face's datasets and of WebDataset
    even          equally many steps on all ranks

Where a stream is, its *mark*, is a few numbers: the next sample of a shard, and for each step that holds samples the
mark at which it held none, and how many it has given since. So a state holds no samples, and to resume is to read
again what a step held.
"""

import fastload.streams.applied  # noqa: F401  # it enters the step of `apply`
from fastload.streams.blocks import Shuffled
from fastload.streams.chain import Stream
from fastload.streams.even import EvenSteps
from fastload.streams.mixed import Mixed
from fastload.streams.packed import PackedStream
from fastload.streams.shards import Shards

__all__ = ["EvenSteps", "Mixed", "PackedStream", "Shards", "Shuffled", "Stream"]
