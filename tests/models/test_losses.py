import pytest
import torch
import torch.nn.functional as F

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    bert_pretraining,
    classification,
    classification_with_auxiliary,
    loss_function,
    mean_squared_error,
    segmentation,
    token_cross_entropy,
)
from tests.simulated.single import single_device


def test_token_cross_entropy_is_the_mean_over_tokens_that_count():
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (3, 5))
    targets[0, 2:] = -100
    total, weight = token_cross_entropy(logits, targets)
    assert weight.shape == total.shape == ()
    assert weight.item() == 12
    assert total.dtype == torch.float64
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(total / weight, expected, rtol=1e-12, atol=0)


def test_parts_add_up_to_the_whole():
    logits, targets = torch.randn(6, 4, 9, dtype=torch.float64), torch.randint(9, (6, 4))
    targets[1] = -100
    whole, weight = token_cross_entropy(logits, targets)
    parts = [
        token_cross_entropy(x, t)
        for x, t in zip(logits.split([1, 2, 3]), targets.split([1, 2, 3]), strict=True)
    ]
    torch.testing.assert_close(sum(p for p, _ in parts), whole, rtol=1e-12, atol=0)
    assert sum(int(w) for _, w in parts) == weight == 20


def test_all_ignored_gives_zero_loss_weight_and_gradient():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    total, weight = token_cross_entropy(logits, torch.full((2, 3), -1), ignore_index=-1)
    total.backward()
    assert total.item() == 0
    assert weight.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    logits = torch.randn(4, 512, 8).to(dtype)
    targets = torch.randint(8, (4, 512))
    total, _ = token_cross_entropy(logits, targets)
    assert total.dtype == torch.float32
    exact, _ = token_cross_entropy(logits.double(), targets)
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)


def test_classification_counts_samples_and_those_it_gets_right():
    logits, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, -100])
    logits[0, 0] = logits[2, 2] = logits[4, 1] = logits[1, 0] = 9.0
    logits[3, 2] = 9.0
    total, weight, metrics = classification(logits, targets)
    assert weight == 4
    assert metrics == {"accuracy": (2, 4)}
    torch.testing.assert_close(total / 4, F.cross_entropy(logits, targets))


def test_auxiliary_heads_count_less():
    generator = torch.Generator().manual_seed(0)
    logits, *heads = torch.randn(3, 6, 5, generator=generator)
    targets = torch.tensor([0, 3, 4, -100, 1, 2])
    total, weight, metrics = classification_with_auxiliary((logits, *heads), targets)
    main, first, second = (F.cross_entropy(each, targets) for each in (logits, *heads))
    torch.testing.assert_close(total / weight, main + 0.3 * first + 0.3 * second)
    assert metrics == classification(logits, targets)[2]
    # In evaluation, the model returns no outputs of the heads.
    alone, weight, _ = classification_with_auxiliary(logits, targets)
    torch.testing.assert_close(alone / weight, main)


def test_segmentation_counts_pixels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    masks = torch.randint(3, (2, 4, 5), generator=generator)
    masks[0, 0] = -100
    total, weight, metrics = segmentation(logits, masks)
    assert weight == 35
    torch.testing.assert_close(total / weight, F.cross_entropy(logits, masks))
    assert metrics == {"accuracy": ((logits.argmax(1) == masks).sum(), 35)}


def test_segmentation_into_yes_and_no_takes_one_logit():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 1, 4, 5, generator=generator)
    masks = torch.randint(2, (2, 4, 5), generator=generator)
    total, weight, metrics = segmentation(logits, masks)
    wanted = F.binary_cross_entropy_with_logits(logits[:, 0], masks.float())
    torch.testing.assert_close(total / weight, wanted)
    assert metrics == {"accuracy": (((logits[:, 0] > 0) == masks).sum(), 40)}


def bert_batch(num_samples: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(num_samples, 8, 7, generator=generator), torch.randn(num_samples, 2)
    tokens = torch.randint(7, (num_samples, 8), generator=generator)
    tokens[:, 3:] = -100
    return outputs, (tokens, torch.randint(2, (num_samples,), generator=generator))


def test_bert_pretraining_adds_both_means():
    outputs, targets = bert_batch(5)
    total, weight = bert_pretraining(outputs, targets)
    assert weight == 5
    tokens = F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())
    torch.testing.assert_close(total / 5, tokens + F.cross_entropy(outputs[1], targets[1]))


def test_bert_pretraining_weighs_samples_alike():
    """Samples have equal weight for any number of masked tokens and any split of the batch."""
    outputs, targets = bert_batch(3)
    targets[0][0, 1:], targets[0][1] = -100, -100
    parts = [
        bert_pretraining(tuple(o[i : i + 1] for o in outputs), tuple(t[i : i + 1] for t in targets))
        for i in range(3)
    ]
    total, _ = bert_pretraining(outputs, targets)
    torch.testing.assert_close(sum(part for part, _ in parts), total)
    single_device = F.cross_entropy(outputs[1][1], targets[1][1])
    torch.testing.assert_close(parts[1][0], single_device)
    one = F.cross_entropy(outputs[0][0, 0], targets[0][0, 0])
    torch.testing.assert_close(parts[0][0], one + F.cross_entropy(outputs[1][0], targets[1][0]))


def test_mean_squared_error_is_torchs():
    output, target = torch.randn(5, 3), torch.randn(5, 3)
    total, weight = mean_squared_error(output, target)
    torch.testing.assert_close(total / weight, F.mse_loss(output, target))


def test_losses_leave_the_device_alone():
    """Regression: losses copied weights known to the host to the device, which made it wait."""
    outputs, targets = bert_batch(3)
    with single_device() as device:
        logits, classes = map(device.to_device, (torch.randn(3, 5), torch.zeros(3).long()))
        there = [tuple(map(device.to_device, nest)) for nest in (outputs, targets)]
        device.host_waits.clear()
        assert mean_squared_error(logits, logits)[1] == 15
        assert bert_pretraining(*there)[1] == 3
        classification(logits, classes)
        token_cross_entropy(logits, classes)
        segmentation(logits[:, :, None, None], classes[:, None, None])
        assert not device.host_waits


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ModelError, match=r"\[2, 3\].*got \[2\]"):
        token_cross_entropy(torch.randn(2, 3, 4), torch.zeros(2, dtype=torch.long))
    outputs, targets = bert_batch(2)
    with pytest.raises(ModelError, match=r"bert_pretraining.*\[2, 8\] and \[2\]"):
        bert_pretraining(outputs, (targets[0], targets[1][:1]))
    with pytest.raises(ModelError, match=r"segmentation.*\[2, 3, 4, 5\] and \[2, 4\]"):
        segmentation(torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ModelError, match=r"mean_squared_error.*\[4, 1\], got \[4\]"):
        mean_squared_error(torch.zeros(4, 1), torch.zeros(4))


def test_losses_by_name():
    assert loss_function("token_cross_entropy") is token_cross_entropy
    with pytest.raises(ModelError, match=r"classification.*got 'hinge'"):
        loss_function("hinge")
