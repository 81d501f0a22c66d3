"""Promise: Each private name of a library stands in one file of fastload, whose docstring has its reason, how it is
probed, and what happens without it. Without it, fastload does what that docstring says.
"""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

from tests.test_layering import MODULES, OF_LIBRARIES, PACKAGE, private_names

PUBLIC = {"_exit", "_current_frames", "_getframe", "_SimpleCData"}
"""Names that Python documents."""
FILES = """
_kit/torch_private random/numpy_random random/python_random reading/hub_streams integrations/prepared
integrations/lightning
"""
"""Each has a library's private names in its docstring."""
ELSEWHERE = {
    "engine/iterator": "_is_owned",
    "processes/packing": "_untyped_storage",
    "processes/child": "_popen",
    "processes/starting": "_preload_modules",
    "settings": "_IterableDataset_len_called _auto_collation _index_sampler",
    "store/dask": "_parameters",
}
"""Those that still stand elsewhere. This list may only shrink."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def test_private_names_of_libraries_stand_in_their_file_with_a_reason() -> None:
    names = {path: private_names(path) for path in MODULES}
    ours = set().union(*(defined for defined, _ in names.values())) | OF_LIBRARIES | PUBLIC
    owners: dict[str, str] = {}
    found = {}
    for path, (_, taken) in names.items():
        foreign, file = taken - ours, name_of(path)
        if file in FILES.split():
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            foreign = {n for n in foreign if n != "_C" and not n.startswith("_fastload")}
            silent = {name for name in foreign if not re.search(rf"\b{name}\b", text)}
            assert not silent, (file, silent)
            assert not (twice := foreign & owners.keys()), (file, twice)
            owners |= dict.fromkeys(foreign, file)
        elif foreign:
            found[file] = " ".join(sorted(foreign))
    assert found == ELSEWHERE


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_training_in_such_a_lightning_has_no_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    import torch

    from fastload.integrations import lightning
    from tests.promises import lightning_cases as cases

    monkeypatch.setattr(lightning, "_NAMES", f"{lightning._NAMES} _data_fetcher._renamed")
    trainer = cases.trainer({"trainer": {"max_epochs": 1}}, tmp_path)
    with pytest.warns(UserWarning, match="has no _data_fetcher._renamed, so checkpoints hold no"):
        trainer.fit(cases.Model({"shuffle": True}, None, None))
    trainer.save_checkpoint(path := tmp_path / "one.ckpt")
    assert lightning.KEY not in torch.load(path, weights_only=True)


def test_a_trainer_without_the_name_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from fastload.integrations.transformers import TrainerMixin

    class Trainer:
        pass

    with pytest.warns(UserWarning, match="has no skip_first_batches in its Trainer's module"):
        type("Mine", (TrainerMixin, Trainer), {"__module__": __name__})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from fastload.integrations.transformers import Trainer as Known  # it knows the name

        type("Mine", (Known,), {"__module__": __name__})
