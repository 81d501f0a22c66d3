"""Tell whether a dataset suits threads: `from fastload.check import check`, or the command `fastload check`.

`reading` reads samples serially and in threads, `compare` compares them by `equality`, and `summary` lists what each
worker copies and what all of them share.
"""

from fastload.check.compare import Finding, Report, check, require_data_set

__all__ = ["Finding", "Report", "check", "require_data_set"]
