"""What of model and data is refused at the start of a run, and in which words."""

from types import SimpleNamespace

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ModelError
from gpipe_hpc.trainer.start.checks import check_model


def test_a_model_that_is_no_sequence_has_nothing_to_do_with_the_batch():
    """The message ended with the smallest batch of the run, which is for BatchNorm to know."""
    config = compose_config(["model=mlp", "data=synthetic_vectors"])
    source = SimpleNamespace(train=SimpleNamespace(num_samples=64))
    with pytest.raises(ModelError, match=r"got int; put the layers into a list$"):
        check_model(config, source, 5)
