"""Twister2:DeepNet's names over fastload, for programs that prepare MNIST on ranks and train on it.

    from fastload.compat.twister2deepnet import ArrowUtils, FileUtils, MNIST, MnistDistributed, UtilPanda
    import fastload.compat.twister2deepnet.distributed as dist
    import fastload.compat.twister2deepnet.utils as utils

Importing this sets the variables OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, which such programs read, under a
launcher that does not set them, such as MPICH's. The values are those of `fastload.distributed.detect_rank()`.

    mnist.py         MNIST, MnistDistributed: the rows of each rank
    tables.py        UtilPanda, ArrowUtils, FileUtils: arrays as Parquet files
    utils.py         DataUtil and functions: mini-batches and their shapes
    distributed.py   torch.distributed for these programs
"""

from fastload.compat.ranks import set_variables
from fastload.compat.twister2deepnet import distributed, utils
from fastload.compat.twister2deepnet.mnist import MNIST, MnistDistributed
from fastload.compat.twister2deepnet.tables import ArrowUtils, FileUtils, UtilPanda
from fastload.compat.twister2deepnet.utils import DataUtil

__all__ = [
    "MNIST",
    "ArrowUtils",
    "DataUtil",
    "FileUtils",
    "MnistDistributed",
    "UtilPanda",
    "distributed",
    "utils",
]

set_variables()
