"""Download MNIST; without a network, write synthetic digits in its files. Or write scikit-learn's digits.

python download.py FOLDER [--synthetic] [--train N] [--test N]
python download.py FOLDER --sklearn
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np

from fastload.datasets import MNIST
from fastload.datasets.idx import write_idx
from fastload.datasets.mnist import raw_folder, split_files
from fastload.datasets.synthetic import generate_digits
from fastload.errors import NoDatasetError


def write_real_digits(folder: str) -> None:
    """Write scikit-learn's 1,797 handwritten digits: 1,500 for training, the last 297 for testing.

    They are 8 x 8 pixels from 0 to 16. Each pixel becomes a square of 3 x 3 from 0 to 255, with a margin of 2 pixels.
    They are shuffled: in scikit-learn's order many digits come in counting, so a neighbour's label is no random one.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    large = (digits.images[order] * 255 / 16).round().repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target[order].astype(np.uint8)
    Path(raw_folder(folder)).mkdir(parents=True, exist_ok=True)
    for train, rows in ((True, slice(1500)), (False, slice(1500, None))):
        for name, array in zip(split_files(train), (images[rows], labels[rows]), strict=True):
            content, path = io.BytesIO(), Path(raw_folder(folder), name)
            write_idx(content, array)
            if path.exists() and path.read_bytes() != content.getvalue():
                raise SystemExit(f"{path} is of another set. Name another folder, or delete it.")
            path.write_bytes(content.getvalue())


def main() -> None:
    """Have all four files in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--synthetic", action="store_true", help="do not try the network")
    parser.add_argument("--train", type=int, default=60_000, help="synthetic digits for training")
    parser.add_argument("--test", type=int, default=10_000, help="and for testing")
    parser.add_argument("--sklearn", action="store_true", help="scikit-learn's digits, 28 x 28")
    args = parser.parse_args()
    if args.sklearn:
        write_real_digits(args.folder)
        print(f"scikit-learn's digits, not MNIST: {MNIST(args.folder)}")
        return
    try:
        if not args.synthetic:
            print(MNIST(args.folder, download=True))
            return
    except NoDatasetError as error:
        print(f"{error}\nSynthetic digits take MNIST's place.")
    generate_digits(args.folder, train=args.train, test=args.test)
    print(MNIST(args.folder))


if __name__ == "__main__":
    main()
