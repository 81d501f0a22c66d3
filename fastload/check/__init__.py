"""A check if workers read a dataset right: `from fastload.check import check`, or the command `fastload check`.

`reading` reads samples serially and by workers. `compare` compares them by `equality` and makes the `report`. In it,
`summary` lists what each worker copies and what all workers share.
"""

from fastload.check.compare import check
from fastload.check.reading import require_dataset
from fastload.check.report import Finding, Report

__all__ = ["Finding", "Report", "check", "require_dataset"]
