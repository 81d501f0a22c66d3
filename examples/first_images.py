"""A first training on images: a folder of JPEGs, a network, a checkpoint that resumes exactly, one rank or several.

    python examples/first_images.py
    torchrun --nproc-per-node 2 examples/first_images.py --folder two-ranks

It reads IMAGES/train/CLASS/*.jpg and IMAGES/test/CLASS/*.jpg, and draws some into the folder shapes if you name none.
If it is stopped, at any moment, the same command resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import DataLoader, RankSampler, distributed
from fastload.datasets import ImageFolder
from fastload.image import RandomResizedCrop, ResizeCenterCrop, normalize_on

SIZE = 64  # pixels of a side, as the network sees an image
GLOBAL_BATCH = 32  # images of all ranks in a step
DRAWN = Path("shapes")
SHAPES = {  # corners and colour
    "circles": (60, (200, 60, 60)),
    "hexagons": (6, (60, 170, 80)),
    "squares": (4, (70, 90, 200)),
    "triangles": (3, (210, 180, 60)),
}


def draw(folder: Path) -> None:
    """Draw 600 images for training and 200 for testing. The folder appears when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    for number in range(800):
        rng = np.random.default_rng(number)
        name, (corners, colour) = list(SHAPES.items())[number % len(SHAPES)]
        noise = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((96, 96), Image.Resampling.BICUBIC)
        x, y, radius, turn = rng.integers([36, 36, 16, 0], [60, 60, 34, 360]).tolist()
        fill = tuple((rng.normal(colour, 40)).clip(0, 255).astype(int).tolist())
        ImageDraw.Draw(image).regular_polygon((x, y, radius), corners, turn, fill=fill)
        path = partial / ("train" if number < 600 else "test") / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)
    partial.rename(folder)


def network(classes: int) -> nn.Module:
    """Return a small network. GroupNorm, unlike BatchNorm, does not depend on the images beside an image."""
    layers: list[nn.Module] = []
    for before, after in [(3, 32), (32, 64), (64, 128)]:
        conv = nn.Conv2d(before, after, 3, stride=2, padding=1)
        layers += [conv, nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def main() -> None:
    """Train from the last checkpoint on, if there is one, and test after each epoch."""
    parser = argparse.ArgumentParser(description="A first training on images.")
    parser.add_argument(
        "--images", type=Path, default=DRAWN, help="default shapes, drawn if missing"
    )
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the run; default run")
    parser.add_argument("--epochs", type=int, default=6, help="default 6")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default 10")
    args = parser.parse_args()

    here = distributed.init()  # under torchrun, mpiexec or srun; alone it is rank 0 of 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.folder.mkdir(parents=True, exist_ok=True)
    if here.rank == 0 and args.images == DRAWN and not DRAWN.exists():
        draw(DRAWN)
    sum_over_ranks(torch.zeros(1))  # so the others wait for the images

    train_set = ImageFolder(
        args.images / "train", transform=RandomResizedCrop(SIZE, scale=(0.4, 1.0), flip=0.5)
    )
    test_set = ImageFolder(args.images / "test", transform=ResizeCenterCrop(SIZE, SIZE))
    workers, pin = distributed.cores(), device.type == "cuda"
    loader = DataLoader(
        train_set,
        batch_size=GLOBAL_BATCH // here.world_size,
        sampler=RankSampler(train_set, seed=0),  # shuffles, and gives this rank its part
        num_workers=workers,
        seed=0,  # of the crops
        pin_memory=pin,
    )
    part = RankSampler(test_set, shuffle=False, ends="uneven")  # each image once
    test_loader = DataLoader(test_set, batch_size=100, sampler=part, num_workers=workers)
    normalize = normalize_on(device)

    torch.manual_seed(0)  # the same weights on every rank
    model = network(len(train_set.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    parallel = DistributedDataParallel(model) if here.world_size > 1 else model

    checkpoint, first, losses = args.folder / "checkpoint.pt", 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first, losses = saved["loader"]["epoch"], saved["losses"]
        print(f"{here} resumes after step {len(losses)}")

    for epoch in range(first, args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            images = normalize(images.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(parallel(images), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(sum_over_ranks(loss.detach() / here.world_size).item())
            step, last = len(losses), args.epochs * len(loader)
            if here.rank == 0 and (step % args.save_every == 0 or step == last):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "losses": losses}
                torch.save(state, f"{checkpoint}.partial")
                os.replace(f"{checkpoint}.partial", checkpoint)  # it is whole, or not there

        right = torch.zeros(1, device=device)
        with torch.inference_mode():
            for images, labels in test_loader:
                right += (model(normalize(images.to(device))).argmax(1) == labels.to(device)).sum()
        accuracy = sum_over_ranks(right).item() / len(test_set)
        if here.rank == 0:
            print(f"epoch {epoch}: step {len(losses)}, loss {losses[-1]:.4f}, test {accuracy:.1%}")
    if here.rank == 0:
        print(loader.stats())  # what bounds this training


if __name__ == "__main__":
    main()
