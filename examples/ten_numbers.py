"""Ten numbers in batches of 5, and of 7: the first program of ElasticDL's design for PyTorch, with one import changed.

    python examples/ten_numbers.py [BATCH_SIZE]

Its loader is fastload's; everything else is as it was. With 7 the second batch of each epoch has the 3 that are left.
"""

from __future__ import annotations

import sys

import torch
import torch.utils.data as Data

from fastload import DataLoader

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 5
x = torch.linspace(1, 10, 10)  # this is x data (torch tensor)
y = torch.linspace(10, 1, 10)  # this is y data (torch tensor)

torch_dataset = Data.TensorDataset(x, y)
loader = DataLoader(  # was Data.DataLoader
    dataset=torch_dataset,  # torch TensorDataset format
    batch_size=BATCH_SIZE,  # mini batch size
    shuffle=True,  # random shuffle for training
    num_workers=2,  # workers for loading data
)


def show() -> None:
    """Print the batches of three epochs."""
    for epoch in range(3):  # train entire dataset 3 times
        for step, (batch_x, batch_y) in enumerate(loader):  # for each training step
            # train your data...
            print(
                "Epoch: ", epoch, "| Step: ", step, "| batch x: ", batch_x, "| batch y: ", batch_y
            )


if __name__ == "__main__":
    show()
