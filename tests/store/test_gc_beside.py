"""Promises:
- `gc` and `rm` run beside each other and beside `put`. A file that vanishes in between is no error.
- `rm` of a link leaves the target of the link.
"""

import os

import torch

from fastload.store import get, put, root


def _put(name, folder):
    put({"x": torch.zeros(4)}, name, root=folder)


def test_sets_and_files_that_vanish_meanwhile_are_no_error(tmp_path, monkeypatch):
    _put("a", tmp_path)
    rmtree = root.shutil.rmtree

    def collect_first(path, **given):
        monkeypatch.setattr(root.shutil, "rmtree", rmtree)
        assert [size > 0 for _, size in root.collect(str(tmp_path))] == [True]
        rmtree(path, **given)

    monkeypatch.setattr(root.shutil, "rmtree", collect_first)
    root.remove(str(tmp_path), "a")
    assert os.listdir(tmp_path / ".unsealed") == []
    assert root.size_of(str(tmp_path / "a")) == 0


def test_removing_a_link_leaves_the_set_that_it_leads_to(tmp_path):
    _put("a", tmp_path / "far")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "b").symlink_to(tmp_path / "far" / "a")
    root.remove(str(tmp_path / "here"), "b")
    assert os.listdir(tmp_path / "here") == []
    assert len(get("a", root=tmp_path / "far")) == 4
