"""A list of PyG's graphs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.loader.dataloader import Collater
from torch_geometric.transforms import AddSelfLoops

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT


def graphs(folder: Path) -> Made:
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    found = [
        Data(x=torch.full((3, 2), float(index)), edge_index=edges, y=torch.tensor([index % 2]))
        for index in range(COUNT)
    ]
    found = [AddSelfLoops()(graph) for graph in found]
    return Made(found, Collater(found))
