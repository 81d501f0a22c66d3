"""Promises:
- Each name and each id of a parameter has one owner. For names it is the owner that ElasticDL chooses.
- Gradients of equal ids add up, and the caller's tensors stay unchanged.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.parameters.partition import merged, owners, string_to_id

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=50)


def test_names_go_where_elasticdl_puts_them() -> None:
    expected = {
        "conv1.weight": 3,
        "conv1.bias": 2,
        "fc1.weight": 2,
        "fc1.bias": 0,
        "out.weight": 2,
    }  # of int(sha256(name).hexdigest(), 32) % 5
    assert {name: string_to_id(name, 5) for name in expected} == expected
    assert {string_to_id(str(number), 3) for number in range(50)} == {0, 1, 2}


@given(IDS, st.integers(1, 7))
def test_each_row_has_one_owner_of_those_that_there_are(ids: list[int], number: int) -> None:
    assert owners(torch.tensor(ids, dtype=torch.int64), number).tolist() == [
        i % number for i in ids
    ]


@given(IDS, st.integers(1, 5))
def test_gradients_of_equal_ids_add_up_and_the_arguments_stay(ids: list[int], dim: int) -> None:
    tensor = torch.tensor(ids, dtype=torch.int64)
    gradients = torch.arange(len(ids) * dim, dtype=torch.float64).view(len(ids), dim)
    before = tensor.clone(), gradients.clone()
    distinct, sums = merged(tensor, gradients)
    assert distinct.tolist() == sorted(set(ids))
    for number, total in zip(distinct.tolist(), sums, strict=True):
        expected = sum(
            (g for i, g in zip(ids, gradients, strict=True) if i == number), torch.zeros(dim)
        )
        assert torch.equal(total, expected)
    assert torch.equal(tensor, before[0])
    assert torch.equal(gradients, before[1])
