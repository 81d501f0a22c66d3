"""The training loop of ALCF's threaded ImageNet example, with its two classes imported instead of defined.

    python examples/alcf.py --base-dir DIR --file-list-path LIST --nworkers 2

Besides the imports, two things changed: it trains ResNet-18 from random weights, so that it needs no download, and it
runs as one process, without DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import time

import torch
from torchvision import models, transforms

from fastload.compat.alcf import ImageNetDataLoader, ImageNetDataset


def build_id_to_index_mapping(file_list_path: str) -> dict[str, int]:
    """Return the number of each class: of the names of the images' folders, in order."""
    with open(file_list_path) as file:
        ids = {line.strip().split("/")[-2] for line in file if line.strip()}
    return {name: number for number, name in enumerate(sorted(ids))}


def main() -> None:
    """Train, and print how many images a second went through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--nbatch", type=int, default=64)
    parser.add_argument("-s", "--nsteps", type=int, default=20)
    parser.add_argument("-w", "--nworkers", type=int, default=1)
    parser.add_argument("--cache-size", type=int, default=2)
    parser.add_argument("--base-dir", required=True)
    parser.add_argument("--file-list-path", required=True)
    parser.add_argument("--status-print-interval", type=int, default=5)
    args = parser.parse_args()
    total_start = time.time()

    transform = transforms.Compose([transforms.Resize((256, 256)), transforms.ToTensor()])
    id_to_index = build_id_to_index_mapping(args.file_list_path)
    dataset = ImageNetDataset(args.base_dir, args.file_list_path, id_to_index, transform=transform)

    batch_size = args.nbatch
    num_workers = args.nworkers
    print(f"num workers: {num_workers}")
    data_loader = ImageNetDataLoader(dataset, batch_size, num_workers, args.cache_size)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(id_to_index)).to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model.train()

    step_time = time.time()
    step = 0
    for images, targets in data_loader:
        images = images.to(device)
        targets = targets.to(device)
        step += 1  # noqa: SIM113  (the original's loop)
        outputs = model(images)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.status_print_interval == 0:
            step_img_rate = args.status_print_interval * batch_size / (time.time() - step_time)
            print(f"step_img_rate: {step_img_rate:.2f}")
            step_time = time.time()
        if step > args.nsteps:
            break

    print("Stopping data loader")
    data_loader.stop()
    print(f"All Done: {time.time() - total_start:.2f}")


if __name__ == "__main__":
    main()
