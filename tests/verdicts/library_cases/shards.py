"""Shards of WebDataset."""

from __future__ import annotations

from pathlib import Path

import webdataset as wds

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


def tar_shards(folder: Path) -> Made:
    for shard in range(2):
        with wds.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for index in range(COUNT):
                writer.write({"__key__": f"{shard}{index}", "npy": wave(index), "cls": index % 2})
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = (
        wds.WebDataset(urls, shardshuffle=False, workersplitter=wds.split_by_worker)
        .shuffle(4)
        .decode()
        .to_tuple("npy", "cls")
        .map_tuple(lambda array: array / 2, lambda label: label)
    )
    return Made(dataset)
