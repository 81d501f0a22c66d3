"""Records of JSON, compressed by LZ4 and checked by their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lz4.frame
import orjson
import torch
import xxhash
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


class Records(Dataset[Any]):
    """Values from compressed records, each of which must have its hash."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.blocks = blocks
        self.hashes = [xxhash.xxh3_64_intdigest(block) for block in blocks]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Any:
        block = self.blocks[index]
        if xxhash.xxh3_64(block).intdigest() != self.hashes[index]:
            raise ValueError(f"record {index} was damaged")
        record = orjson.loads(lz4.frame.decompress(block))
        return torch.tensor(record["values"]), record["label"]


def records(folder: Path) -> Made:
    rows = [{"values": [index, 2.5], "label": index % 2} for index in range(COUNT)]
    return Made(Records([lz4.frame.compress(orjson.dumps(row)) for row in rows]))
