"""Texts, and the tokenizers that encode them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import texts


def local_tokenizer() -> Tokenizer:
    """Return a tokenizer with a vocabulary of its own, which needs no download."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{k}": k + 2 for k in range(20)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def fast_tokenizer() -> Any:
    """Return such a tokenizer as transformers wraps it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=local_tokenizer(), pad_token="[PAD]", unk_token="[UNK]"
    )


class Sentences(Dataset[Any]):
    """Texts with labels, encoded when they are read."""

    def __init__(self, sentences: list[str], tokenizer: Tokenizer) -> None:
        self.sentences = sentences
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Any:
        encoding = self.tokenizer.encode(self.sentences[index])
        return torch.tensor(encoding.ids), index % 2


def pad(batch: list[Any]) -> Any:
    ids, labels = zip(*batch, strict=True)
    return pad_sequence(ids, batch_first=True, padding_value=0), torch.tensor(labels)


def word_level(folder: Path) -> Made:
    return Made(Sentences(texts(), local_tokenizer()), pad)
