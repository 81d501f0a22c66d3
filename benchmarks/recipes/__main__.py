"""`python -m benchmarks.recipes RECIPE VARIANT ROOT OUT`: packs the images below ROOT into the empty folder OUT."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    recipe, variant, root, out = sys.argv[1:]
    importlib.import_module(f"benchmarks.recipes.{recipe}").pack(Path(root), Path(out), variant)
