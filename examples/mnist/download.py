"""Download MNIST; without a network, write synthetic digits in its files.

python download.py FOLDER [--synthetic] [--train N] [--test N]
"""

from __future__ import annotations

import argparse

from fastload.datasets import MNIST
from fastload.datasets.digits import generate_digits
from fastload.errors import NoDatasetError


def main() -> None:
    """Have all four files in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--synthetic", action="store_true", help="do not try the network")
    parser.add_argument("--train", type=int, default=60_000, help="synthetic digits for training")
    parser.add_argument("--test", type=int, default=10_000, help="and for testing")
    args = parser.parse_args()
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
