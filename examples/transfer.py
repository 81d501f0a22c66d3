"""Transfer learning: a network turns each image into features once, and a head is trained on the features.

    python examples/transfer.py                               # ResNet-50 at 224 pixels: some minutes on a CPU
    python examples/transfer.py --model resnet18 --size 64    # a quick one
    python examples/transfer.py --weights resnet50.pt         # weights that know something of images

The images are 3,670 generated flowers of five classes, as many as tf_flowers has. They are drawn, not photographed: the
accuracy says that the features reach the head in the right order, and nothing about photographs.

It trains twice. The second training finds the features, and opens no image. So does the first one, if the script runs
again with the same folder and arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

import fastload
from fastload import store
from fastload.datasets import ImageFolder
from fastload.image import IMAGENET_MEAN, IMAGENET_STD, Resize

FLOWERS = {  # petals, their length by their width, and their colour
    "daisy": (13, 3.5, (245, 245, 235)),
    "dandelion": (24, 6.0, (245, 205, 40)),
    "roses": (5, 1.1, (190, 25, 50)),
    "sunflowers": (18, 2.5, (240, 160, 20)),
    "tulips": (3, 1.6, (215, 90, 170)),
}
SIDE = 96  # pixels of an image
HELD_OUT = 5  # every fifth image is for the test


class Garden(torch.utils.data.Dataset[int]):
    """Sample `i` draws flower number `i` into its file. Flower `i` is the same in every run."""

    fastload_per_worker = ()

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.count = root, count
        for name in FLOWERS:
            (root / name).mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        name = list(FLOWERS)[number % len(FLOWERS)]
        path = self.root / name / f"{number:05d}.jpg"
        if not path.exists():
            partial = path.with_suffix(".partial")
            draw(name, np.random.default_rng(number)).save(partial, "JPEG", quality=90)
            partial.replace(path)
        return number


def draw(name: str, rng: np.random.Generator) -> Image.Image:
    """Return a flower of that kind: somewhere, of some size, turned, in changing light, on noisy leaves."""
    petals, slimness, colour = FLOWERS[name]
    leaves = rng.normal((70, 105, 55), 25, (SIDE // 8, SIDE // 8, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(leaves).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    x, y = rng.uniform(0.35, 0.65, 2) * SIDE
    length, turn = rng.uniform(0.25, 0.42) * SIDE, rng.uniform(0, 2 * math.pi)
    tint = tuple(
        int(value) for value in np.clip(rng.normal(colour, 25) * rng.uniform(0.6, 1.1), 0, 255)
    )
    for petal in range(petals):
        angle = turn + 2 * math.pi * petal / petals
        along, across = (math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))
        ring = [
            (length / 2 * (1 + math.cos(t)), length / slimness / 2 * math.sin(t))
            for t in np.linspace(0, 2 * math.pi, 24)
        ]
        outline = [
            (x + u * along[0] + v * across[0], y + u * along[1] + v * across[1]) for u, v in ring
        ]
        pen.polygon(outline, fill=tint, outline=(60, 50, 40))
    if name in ("daisy", "sunflowers"):
        radius = length * (0.25 if name == "daisy" else 0.45)
        heart = (235, 190, 40) if name == "daisy" else (80, 50, 25)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=heart)
    return image


def flowers(root: Path, count: int) -> Path:
    """Draw what is missing of `count` flowers; return their folder."""
    with fastload.DataLoader(
        Garden(root, count), batch_size=64, num_workers=os.cpu_count() or 1
    ) as loader:
        for _ in loader:
            pass
    return root


class OpenedImages:
    """Counts the images that this process opens, by an audit hook of Python."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            self.count += os.fsdecode(arguments[0]).endswith(".jpg")


def train(args: argparse.Namespace, images: Path) -> tuple[float, float, float]:
    """Make or find the features and train a head on them; return the seconds of both, and the accuracy."""
    began = time.perf_counter()
    # Python opens the files only if whole images are decoded. Otherwise it could not count them.
    size = (args.size, args.size)
    plan = Resize(size, mean=IMAGENET_MEAN, std=IMAGENET_STD, region_decode=False)
    features = store.features(
        args.folder / "sets" / "flowers",
        dataset=ImageFolder(images, transform=plan),
        model=store.backbone(args.model, weights=args.weights, layout=args.layout),
        device="cuda" if torch.cuda.is_available() else None,
        loader={"worker_method": "thread"},  # the images that processes open are not counted
        parts=8,
        version=f"{args.layout}, {args.size} pixels",
        replace=True,
        progress=True,
    )
    made = time.perf_counter()

    torch.manual_seed(0)
    numbers = torch.arange(len(features))
    test = torch.utils.data.Subset(features, numbers[numbers % HELD_OUT == 0].tolist())
    rest = torch.utils.data.Subset(features, numbers[numbers % HELD_OUT != 0].tolist())
    width, classes = features[0][0].numel(), len(features.classes)
    head = nn.Sequential(nn.BatchNorm1d(width, affine=False), nn.Linear(width, classes))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3 if width < 10_000 else 1e-4)
    with fastload.DataLoader(
        rest, batch_size=256, shuffle=True, seed=0, drop_last=len(rest) > 256
    ) as loader:
        for _ in range(args.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(x), y).backward()
                optimizer.step()

    head.eval()
    right = 0
    with torch.inference_mode(), fastload.DataLoader(test, batch_size=256) as loader:
        for x, y in loader:
            right += int((head(x).argmax(1) == y).sum())
    return made - began, time.perf_counter() - made, right / len(test)


def main() -> None:
    """Train twice, and say what each training took and read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = Path(tempfile.gettempdir(), f"fastload-transfer-{os.getuid()}")
    parser.add_argument(
        "--folder", type=Path, default=own, help=f"of images and features (default {own})"
    )
    parser.add_argument("--count", type=int, default=3670, help="images (default 3670)")
    parser.add_argument("--model", default="resnet50", help="of torchvision (default resnet50)")
    parser.add_argument(
        "--weights", default="random", help="a file, default (downloaded), or random (default)"
    )
    parser.add_argument(
        "--layout", choices=["pooled", "flat"], default="pooled", help="(default pooled)"
    )
    parser.add_argument(
        "--size", type=int, default=224, help="pixels of the network's input (default 224)"
    )
    parser.add_argument("--epochs", type=int, default=10, help="of the head (default 10)")
    args = parser.parse_args()

    images = flowers(args.folder / f"flowers-{args.count}", args.count)
    label = (
        "random weights, which know nothing of images" if args.weights == "random" else args.weights
    )
    print(f"{args.count:,} generated flowers; {args.model}, {args.layout}; weights: {label}")
    opened = OpenedImages()
    for which in ("first", "second"):
        opened.count = 0
        making, training, accuracy = train(args, images)
        print(
            f"{which} training: features after {making:.1f} s, {args.epochs} epochs of the head in {training:.1f} s, "
            f"{opened.count:,} images opened, accuracy {accuracy:.1%} (chance {1 / len(FLOWERS):.0%})"
        )


if __name__ == "__main__":
    main()
