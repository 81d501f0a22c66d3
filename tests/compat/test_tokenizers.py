"""Promise: With fast tokenizers, 8 workers give 2,048 right results for texts and summaries of two maximum lengths.
The tokenizer may be in the dataset, in `collate_fn` or in a Hugging Face transform.

A call sets truncation and padding in the tokenizer, and then encodes.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.eight_workers import PAIRS, Pairs, library, wrong_pairs

tokenizers = library("tokenizers")
transformers = library("transformers")

WORDS = 3_000
LONG, SHORT = 24, 7


def words(index: int) -> str:
    """Return 30 words, beginning with one of the sample's own."""
    return " ".join(f"w{(index + k) % WORDS}" for k in range(30))


def right(index: int) -> torch.Tensor:
    """Return the ids of the text cut at `LONG`, then of the summary cut at `SHORT`."""
    return torch.tensor(
        [1 + (index + k) % WORDS for length in (LONG, SHORT) for k in range(length)]
    )


def rust_tokenizer() -> Any:
    vocabulary = {"[PAD]": 0} | {f"w{i}": i + 1 for i in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def fast_tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust_tokenizer(), pad_token="[PAD]", unk_token="[PAD]"
    )


def encode(tokenizer: Any, text: str, summary: str) -> torch.Tensor:
    """Return both texts' ids; a wrong length shows as another shape, cut or filled up here."""
    found = tokenizer(text, max_length=LONG, truncation=True)["input_ids"]
    target = tokenizer(summary, max_length=SHORT, truncation=True)["input_ids"]
    return as_row(found, target)


def as_row(found: list[int], target: list[int]) -> torch.Tensor:
    row = torch.zeros(LONG + SHORT, dtype=torch.int64)
    row[: min(LONG, len(found))] = torch.tensor(found[:LONG])
    row[LONG : LONG + min(SHORT, len(target))] = torch.tensor(target[:SHORT])
    return row if (len(found), len(target)) == (LONG, SHORT) else -row


class Own(Pairs):
    """The tokenizer is an attribute."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return encode(self.tokenizer, words(index), words(index)), right(index)


def test_a_fast_tokenizer_with_two_lengths() -> None:
    assert wrong_pairs(Own(fast_tokenizer())) == 0


def test_a_tokenizer_in_collate_fn() -> None:
    tokenizer = fast_tokenizer()

    def collated(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [words(i) for i in indices]
        found = tokenizer(texts, max_length=LONG, truncation=True)["input_ids"]
        target = tokenizer(texts, max_length=SHORT, truncation=True)["input_ids"]
        rows = [as_row(*both) for both in zip(found, target, strict=True)]
        return torch.stack(rows), torch.stack([right(i) for i in indices])

    indices = list(range(PAIRS))
    assert wrong_pairs(indices, collate_fn=collated, batch_size=2) == 0


def test_a_transform_of_a_hugging_face_dataset() -> None:
    datasets = library("datasets")
    tokenizer = fast_tokenizer()

    def encoded(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = [encode(tokenizer, text, text) for text in rows["text"]]
        return {"found": found, "right": [right(i) for i in rows["index"]]}

    rows = datasets.Dataset.from_dict(
        {"text": [words(i) for i in range(PAIRS)], "index": list(range(PAIRS))}
    )
    rows.set_transform(encoded)

    def collated(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        found, expected = zip(*((item["found"], item["right"]) for item in items), strict=True)
        return torch.stack(found), torch.stack(expected)

    assert wrong_pairs(rows, collate_fn=collated, batch_size=4) == 0
