"""The tutorial's serial script: the loop reads, decodes and collates for itself, then trains.

    python benchmarks/imagenet_serial.py -b 64 -s 20 --base-dir /data/imagenet

`imagenet_parallel.py` differs in the loader alone. Options and lines are the tutorial's; those of `fastload train` are
there too.
"""

import sys

from fastload.cli import main

if __name__ == "__main__":
    main(["train", "--file-list-path", "ilsvrc_train_filelist.txt", "-w", "0", *sys.argv[1:]])
