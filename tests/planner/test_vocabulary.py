"""Data with more tokens than the model has embeddings for is refused."""

import pytest
from torch import nn

from gpipe_hpc import LayerSpec
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.vocabulary import check_vocabulary
from tests.support import refusal


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 2)
        self.positions = nn.Embedding(block_size, 2)


@pytest.mark.parametrize("first", [LayerSpec(Embedding, 100, 64), Embedding(100, 64)])
def test_both_numbers_are_named(first):
    check_vocabulary([first, nn.Linear(2, 2)], 100)
    with pytest.raises(
        ConfigError, match=r"data\.vocab_size=101 is too large: .*embeddings for 100 tokens"
    ):
        check_vocabulary([first, nn.Linear(2, 2)], 101)


def test_longer_table_of_positions_makes_no_false_alarm():
    assert refusal(check_vocabulary, [Embedding(100, 2048)], 100) is None


def test_model_without_embeddings_is_let_pass():
    assert refusal(check_vocabulary, [nn.Linear(2, 2)], 10**6) is None
