"""Promise: Rows of two sets are never mixed, even if one takes the name of the other while that is read or copied
without checksums.
"""

import pickle

import pytest
import torch

from fastload.errors import PackedDataError
from fastload.store import fetch, get, put, shard_bytes, staging
from fastload.store.root import remove


def _put(value, root):
    put([{"x": torch.full((4,), value)} for _ in range(3)], "a", root=root, checksums=False)


def _replace(root):
    remove(str(root), "a")
    _put(2, root)


def test_a_part_of_another_set_is_refused(tmp_path):
    _put(1, tmp_path)
    dataset = get("a", data="x", root=tmp_path)
    assert dataset[0] == 1
    _replace(tmp_path)
    assert dataset[1] == 1, "a part that is mapped stays"
    with pytest.raises(PackedDataError, match="another set has this name now"):
        dataset[4]
    with pytest.raises(PackedDataError, match="another set has this name now"):
        pickle.loads(pickle.dumps(dataset))[0]
    assert get("a", data="x", root=tmp_path)[4] == 2


def test_a_set_that_is_replaced_while_it_is_copied_is_refused(tmp_path, monkeypatch):
    _put(1, tmp_path / "from")
    copied = shard_bytes.each

    def replaced(*args, **how):
        parts = copied(*args, **how)
        yield next(parts)
        _replace(tmp_path / "from")
        yield from parts

    monkeypatch.setattr(shard_bytes, "each", replaced)
    with pytest.raises(PackedDataError, match="was replaced while it was copied"):
        staging.stage(tmp_path / "from" / "a", tmp_path / "to" / "a", workers=0)
    assert not (tmp_path / "to" / "a").exists()
    monkeypatch.undo()
    staging.stage(tmp_path / "from" / "a", tmp_path / "to" / "a", workers=0)
    assert get("a", data="x", root=tmp_path / "to")[0] == 2


def test_a_source_that_is_replaced_while_it_is_copied_is_refused(tmp_path, monkeypatch):
    _put(1, tmp_path / "from")
    read, copied = fetch._read, []

    def replace_after_first(*given):
        yield from read(*given)
        if not copied:
            _replace(tmp_path / "from")
        copied.append(given)

    monkeypatch.setattr(fetch, "_read", replace_after_first)
    with pytest.raises(PackedDataError, match="a different set with this name"):
        get("a", root=tmp_path / "to", source=tmp_path / "from")
    assert len(copied) == 1
    assert not (tmp_path / "to" / "a" / "shard-00001.arrow").exists()
