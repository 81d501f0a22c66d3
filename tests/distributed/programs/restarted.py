"""What a rank does that torchrun restarts: at first the last one ends with an error, once all have met.

restarted.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fastload import distributed


def main(folder: Path) -> None:
    first = not (folder / "failed").exists()
    here = distributed.init("gloo", timeout_s=30)
    print(f"{here} met the others, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    if first and here.rank == here.world_size - 1:
        (folder / "failed").touch()
        os._exit(3)
    if first:
        signal.pause()  # until torchrun ends this rank, which has not failed
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
