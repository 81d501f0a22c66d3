"""Arrays in Parquet files, to pass them to another program. Needs pyarrow (extra `arrow`) and pandas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fastload._kit.disk import replace_file

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class UtilPanda:
    """Arrays as frames."""

    @staticmethod
    def convert_numpy_to_pandas(array: NDArray[Any]) -> pd.DataFrame:
        """Return a frame with the rows and columns of an array, or with one column if it has one dimension."""
        import pandas as pd

        return pd.DataFrame(array)


class ArrowUtils:
    """Frames in Parquet files."""

    @staticmethod
    def create_to_table(dataFrame: pd.DataFrame) -> pa.Table:
        """Return a frame as a table of Arrow."""
        import pyarrow as pa

        return pa.Table.from_pandas(dataFrame, preserve_index=False)

    @staticmethod
    def write_to_table(table: pa.Table, save_path: str | os.PathLike[str]) -> None:
        """Write a table to a Parquet file, whole or not at all."""
        from pyarrow import parquet

        with replace_file(save_path) as file:
            parquet.write_table(table, file)

    @staticmethod
    def read_from_table(save_path: str | os.PathLike[str]) -> pd.DataFrame:
        """Return the rows of a Parquet file as a frame."""
        from pyarrow import parquet

        with parquet.ParquetFile(save_path) as file:
            return file.read().to_pandas()


class FileUtils:
    """Folders."""

    @staticmethod
    def mkdir_branch_with_access(path: str | os.PathLike[str]) -> None:
        """Create a folder and its parents. The umask decides on access, so not all users may write to it."""
        os.makedirs(path, exist_ok=True)
