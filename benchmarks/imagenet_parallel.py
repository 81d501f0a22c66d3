"""The tutorial's parallel script: threads read, decode and collate while the loop trains.

    python benchmarks/imagenet_parallel.py -w 4 -b 64 -s 20 --base-dir /data/imagenet
    mpiexec -n 4 python benchmarks/imagenet_parallel.py -w 4

`imagenet_serial.py` differs in the loader alone. Options and lines are the tutorial's; those of `fastload train` are
there too.
"""

import sys

from fastload.cli import main

if __name__ == "__main__":
    main(["train", "--file-list-path", "ilsvrc_train_filelist.txt", *sys.argv[1:]])
