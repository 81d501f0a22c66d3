"""Writes docs/promises.md from the docstrings of the tests and benchmarks, which it parses and never imports.

A docstring begins with `Promise: ...`, or with `Promises:` and a list of `- ` items, which may end with "See also `x`."
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "promises.md"
BEGINNING = """\
# What the tests show

README has the ten promises. This page has every sentence that a test or a benchmark holds, beside it. `scripts/test`
runs the tests. `scripts/bench NAME` runs `benchmarks/NAME.py`; aims and figures are in
[benchmarks/README.md](../benchmarks/README.md), results with their provenance in `benchmarks/results/`.
This page is written by `scripts/promises` from the docstrings of the tests and benchmarks.
"""

AREAS = {
    "Order": """tests/promises/test_{exactly_once,kinds_of_worker,ranks,blocks} tests/test_sampler
        tests/promises/test_recorded_batches""",
    "In place of torch's DataLoader": """tests/promises/test_{arguments,parity_default_collate,coexistence}
        tests/test_{workers,torch_private} tests/promises/test_{lightning*,accelerate*,trainer*,torch_threads}
        tests/promises/test_{frameworks,framework_examples}""",
    "Sequences": "tests/sequences/test_{orders,mixture,token_batches,lengths,*} benchmarks/sequences",
    "Random numbers": """tests/promises/test_randomness tests/isolation/test_{random_is_the_sample_s,*_random}
        tests/isolation/test_{generators,places_of_generators} tests/compat/test_randomness benchmarks/randomness""",
    "Each worker has its own state": """tests/isolation/test_{state_is_copied,what_is_copied,random_graphs,*}
        tests/compat/*""",
    "Threads or processes": "tests/verdicts/test_{library_cases,*}",
    "Threads at once": "tests/test_races tests/stress/*",
    "Errors": "tests/promises/test_{errors_in_place,hostile_code,stalls_and_bounds,faults} tests/test_errors",
    "Stopping and resuming": "tests/promises/test_{stopping,resume,beginnings,checkpoints} tests/cli/*",
    "Worker processes": "tests/processes/test_{deaths,memory,starts,signals,errors,*}",
    "Memory": "tests/promises/test_kept_batches tests/test_window{_model,} benchmarks/memory",
    "Beside the training loop": "tests/promises/test_{beside_the_loop,prefetch,memory_format} benchmarks/beside",
    "Iterable datasets": "tests/promises/test_iterable",
    "Reports and checks": "tests/telemetry/* tests/promises/test_telemetry_scenarios tests/test_check",
    "Datasets that fill rows": "tests/promises/test_filled_{rows,rows_broken,images}",
    "Images": """tests/image/test_{plans,pixels,decode,region_decoder} tests/promises/test_plans_in_the_loader
        tests/image/test_{kernels_installation,*}""",
    "Packed sets": """tests/datasets/test_packed tests/promises/test_{packed_damage,packed_packing,damaged_files}
        tests/test_windowed_shuffle tests/datasets/test_staging benchmarks/packing""",
    "Other datasets": "tests/datasets/test_{image_files,mnist,synthetic,parquet}",
    "Features and predictions": "tests/store/test_{features,predictions,predictions_on_ranks}",
    "Sets of columns": """tests/store/test_{put_and_get,whole_columns,replaced_sets,worlds,placement,prepare,*}
        tests/promises/test_damaged_files benchmarks/store""",
    "Streams": "tests/stream/test_{predict,faults,*}",
    "Ranks and clusters": "tests/distributed/test_{detect,real_ranks,rendezvous,*} tests/submit/test_{submit,*}",
    "Training": "tests/train/test_{train,resume,errors_on_ranks,stats_file} tests/measure/test_{run_stats,averages}",
    "Profiler and TensorBoard": "tests/train/* tests/test_tensorboard tests/browser/test_tensorboard",
    "fastload bench": "tests/bench/test_{bench,*} tests/browser/test_report tests/measure/*",
    "Programs of other projects": "tests/flow/test_twister2* tests/datasets/test_{alcf,elasticdl_examples}",
    "Pipelines": "tests/flow/test_{graph,runner,*}",
    "Leases": "tests/elastic/test_{protocol,leases,*}",
    "Parameters on servers": "tests/parameters/test_{pushes,partition,tables,restarts,*}",
    "Speed": "benchmarks/{latency,collate,images,tensor_dataset,*} tests/test_{benchmarks,peers}",
    "The project": "tests/test_{import,layering,sizes,cli,*} tests/docs/* tests/browser/*",
}
"""Section to modules, in the order of the page. A module stands in the first that names it; `{a,b}` is either."""

HEADER = "| promise | shown by |\n|---|---|"
END = f"""
## Shown by scripts

{HEADER}
| `tests/promises` hold under `copy_dataset="state"` and under `copy_dataset=False`. | `scripts/test --all` |
| Python 3.11 to 3.15 are supported. Each version that can be had is tested. | `scripts/test --all` |
| No name in the code is unused, and no seven lines of code occur twice. | `scripts/test` (vulture, pylint) |
| The core alone is tested in a fast loop. | `scripts/test --fast` |
"""


def expand(patterns: str) -> Iterator[str]:
    """Yield the patterns of an area, each as one glob: `tests/test_{a,b}` is two."""
    for pattern in patterns.split():
        begin, _, rest = pattern.partition("{")
        middle, _, end = rest.partition("}")
        yield from (f"{begin}{part}{end}.py" for part in middle.split(","))


@cache
def promises(module: str) -> list[tuple[str, list[str]]]:
    """Return the promises in a module's docstring, each with the files that it says to see also."""
    docstring = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
    kind, _, text = docstring.split("\n\n")[0].partition(":")
    items = {"Promise": [text], "Promises": text.split("\n- ")[1:]}.get(kind, [])
    parts = (" ".join(item.split()).partition(" See also ") for item in items)
    return [(promise, re.findall("`(.+?)`", also)) for promise, _, also in parts]


def sections() -> dict[str, list[str]]:
    """Return title to modules. Raise ValueError if no area names a module."""
    kinds = "tests/**/test_*.py", "benchmarks/*.py"
    left = {str(file.relative_to(ROOT)) for kind in kinds for file in ROOT.glob(kind)}
    found: dict[str, list[str]] = {}
    for title, patterns in AREAS.items():
        found[title] = []
        for pattern in expand(patterns):
            found[title] += sorted(
                matching := {module for module in left if Path(module).match(pattern)}
            )
            left -= matching
    if left:
        raise ValueError(f"no area of {__file__} names {', '.join(sorted(left))}")
    return found


def page() -> str:
    """Return the text of docs/promises.md."""
    text = BEGINNING
    for title, modules in sections().items():
        text += f"\n## {title}\n\n{HEADER}\n"
        for module in modules:
            for promise, also in promises(module):
                shown = ", ".join(f"[`{file}`](../{file})" for file in [module, *also])
                text += f"| {promise} | {shown} |\n"
    return text + END


if __name__ == "__main__":
    PAGE.write_text(page())
