"""Log-probs and entropy: exact against log_softmax, without a copy of the logits, deaf to unused rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regress.grpo.argument_checks import InputError
from regress.grpo.selective_log_softmax import Pieces, online_softmax, row_blocks, token_log_probs


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -torch.xlogy(log_p.exp(), log_p.exp()).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


def make(
    seed: int, *shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return logits.to(dtype).requires_grad_(), targets


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1,), (5,), (4, 1), (3, 11), (2, 3, 7), (0, 5), (2, 0, 5)]),
    chunk=st.sampled_from([1, 2, 3, 100]),
    temperature=st.sampled_from([0.7, 1.0, 1.5]),
    block=st.sampled_from([1, 6, 1 << 20]),
)
def test_values_and_gradients_equal_log_softmax(
    seed: int, shape: tuple[int, ...], chunk: int, temperature: float, block: int
) -> None:
    logits, targets = make(seed, *shape)
    ours, theirs = [], []
    sizes = {"vocab_chunk": chunk, "block": block}
    out = token_log_probs(logits, targets, temperature=temperature, entropy=True, **sizes)
    assert out.entropy is not None
    ours += [out.log_probs, out.entropy]
    upstream = torch.randn(2, *targets.shape, dtype=torch.float64)
    ours += torch.autograd.grad(upstream[0].mul(ours[0]).sum() + upstream[1].mul(ours[1]).sum(), logits)
    ours += torch.autograd.grad(token_log_probs(logits, targets, **sizes).log_probs.sum(), logits)
    theirs += reference(logits, targets, temperature)
    theirs += torch.autograd.grad(upstream[0].mul(theirs[0]).sum() + upstream[1].mul(theirs[1]).sum(), logits)
    theirs += torch.autograd.grad(reference(logits, targets, 1.0)[0].sum(), logits)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)


def test_a_shifted_view_equals_its_copy() -> None:
    logits, targets = make(6, 3, 5, 4)
    for view in (logits[:, :-1], logits.transpose(0, 1), logits[..., :3], logits[1:2].expand(3, 5, 4)):
        wanted = targets[tuple(map(slice, view.shape[:-1]))].clamp(max=2) if view.shape[0] != 5 else targets.T
        wanted = wanted.clamp(max=view.shape[-1] - 1)
        results = []
        for form in (view, view.contiguous()):
            out = token_log_probs(form, wanted, vocab_chunk=2, entropy=True)
            assert out.entropy is not None
            upstream = torch.arange(wanted.numel(), dtype=torch.float64).view(wanted.shape)
            total = (upstream * (out.log_probs + 2 * out.entropy)).sum()
            results.append((out.log_probs, out.entropy, *torch.autograd.grad(total, form)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_results_may_be_changed_in_place_before_the_backward_pass() -> None:
    logits, targets = make(7, 4, 6)
    plain = token_log_probs(logits, targets, entropy=True)
    changed = token_log_probs(logits, targets, entropy=True)
    assert plain.entropy is not None
    assert changed.entropy is not None
    (expected,) = torch.autograd.grad(2 * plain.entropy.sum() + 3 * plain.log_probs.sum(), logits)
    total = changed.entropy.mul_(2).sum() + changed.log_probs.mul_(3).sum()
    assert torch.equal(torch.autograd.grad(total, logits)[0], expected)


def test_gradcheck() -> None:
    logits, targets = make(0, 3, 5)

    def both(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        out = token_log_probs(logits, targets, temperature=0.7, vocab_chunk=2, entropy=True)
        return out.log_probs, out.entropy

    assert torch.autograd.gradcheck(both, (logits,))
    assert torch.autograd.gradcheck(lambda x: both(x)[0], (logits,))
    assert torch.autograd.gradcheck(lambda x: both(x)[1], (logits,))


def test_entropy_without_gradient() -> None:
    logits, targets = make(1, 4, 6)
    out = token_log_probs(logits, targets, entropy="no_grad")
    assert out.entropy is not None
    assert not out.entropy.requires_grad
    assert out.log_probs.requires_grad
    torch.testing.assert_close(out.entropy, reference(logits, targets, 1.0)[1].detach())
    assert token_log_probs(logits, targets).entropy is None


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = make(2, 8, 300, dtype=dtype)
    out = token_log_probs(logits, targets, temperature=temperature, vocab_chunk=64, entropy=True)
    assert out.entropy is not None
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    exact = reference(logits.double(), targets, temperature)
    torch.testing.assert_close(out.log_probs.double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy.double(), exact[1], rtol=1e-6, atol=1e-6)


def test_gradient_of_a_likely_target_does_not_cancel_in_half_precision() -> None:
    # p = 0.9991: (1 - p) is about 9e-4, but 1 - bfloat16(p) would be 0
    logits = torch.tensor([[7.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(token_log_probs(logits, torch.tensor([0])).log_probs.sum(), logits)
    exact = 1 - torch.sigmoid(torch.tensor(7.0)).item()
    assert grad[0].tolist() == pytest.approx([exact, -exact], rel=1e-2)


def test_extreme_logits() -> None:
    logits = torch.tensor(
        [[1e30, 0.0, -1e30], [-math.inf, 2.0, 2.0], [-math.inf, -math.inf, 0.0]], requires_grad=True
    )
    targets = torch.tensor([0, 1, 0])
    for chunk in (1, 3):
        out = token_log_probs(logits, targets, vocab_chunk=chunk, entropy=True)
        assert out.entropy is not None
        assert out.log_probs.tolist() == pytest.approx([0.0, -math.log(2), -math.inf])
        assert out.entropy.tolist() == pytest.approx([0.0, math.log(2), 0.0])
        (grad,) = torch.autograd.grad(out.entropy.sum() + out.log_probs[:2].sum(), logits)
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_rows_whose_output_is_unused_cannot_leak(entropy: bool) -> None:
    logits, targets = make(3, 4, 6)
    poisoned = logits.detach().clone()
    poisoned[1] = math.nan
    poisoned[3, 2] = math.inf
    poisoned.requires_grad_()
    keep = torch.tensor([0, 2])
    grads = []
    for given_logits in (logits, poisoned):
        out = token_log_probs(given_logits, targets, vocab_chunk=4, entropy=entropy)
        total = out.log_probs[keep].sum()
        if out.entropy is not None:
            total = total + out.entropy[keep].sum()
        grads += torch.autograd.grad(total, given_logits)
    assert torch.equal(grads[0], grads[1])
    assert not grads[1][[1, 3]].any()


class Allocations(TorchDispatchMode):
    """Numbers of elements of every new storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.sizes.append(leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "shifted"])
def test_nothing_as_large_as_the_logits_but_their_gradient(
    entropy: bool, dtype: torch.dtype, layout: str
) -> None:
    block = 1000
    logits, targets = make(4, 3, 40, 200, dtype=dtype)
    if layout == "shifted":  # the way a causal model's logits are cut: a view that is not contiguous
        logits, targets = logits[:, :-1], targets[:, 1:]
        assert not logits.is_contiguous()
    with Allocations() as forward:
        out = token_log_probs(logits, targets, temperature=0.7, vocab_chunk=50, block=block, entropy=entropy)
    assert max(forward.sizes) <= block
    total = out.log_probs.sum() if out.entropy is None else (out.log_probs + out.entropy).sum()
    with Allocations() as backward:
        torch.autograd.grad(total, logits)
    large = [size for size in backward.sizes if size > block]
    assert large == [logits.numel()]


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.long), {}, r"targets \(torch.int64, shape \(3,\)\) do not fit logits"),
        (torch.zeros(2), {}, r"targets \(torch.float32, shape \(2,\)\) do not fit logits"),
        (torch.tensor([0, 5]), {}, r"targets span 0 to 5, outside the vocabulary of 5: fill positions"),
        (torch.tensor([-100, 1]), {}, r"targets span -100 to 1, outside the vocabulary of 5"),
        (torch.tensor([0, 1]), {"temperature": 0.0}, r"temperature=0.0 cannot divide logits"),
        (torch.tensor([0, 1]), {"temperature": math.nan}, r"temperature=nan cannot divide logits"),
        (torch.tensor([0, 1]), {"vocab_chunk": 0}, r"vocab_chunk=0 is not a size"),
        (torch.tensor([0, 1]), {"block": 0}, r"block=0 is not a size"),
    ],
)
def test_bad_input(targets: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        token_log_probs(torch.zeros(2, 5), targets, **options)


def test_a_single_row_that_is_no_contiguous_memory() -> None:
    logits, _ = make(7, 9, 2)
    row = logits.detach()[:, 1]
    found = token_log_probs(row, torch.tensor(4), entropy=True)
    log_prob, entropy = reference(row, torch.tensor(4), 1.0)
    torch.testing.assert_close(found.log_probs, log_prob, rtol=1e-13, atol=0)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("columns", "elements", "sizes"),
    [
        (5, 1, [1, 1, 1, 1, 1, 1, 1]),
        (5, 9, [1, 1, 1, 1, 1, 1, 1]),
        (5, 10, [2, 2, 2, 1]),
        (9, 15, [3, 3, 1]),
        (2, 6, [3, 3, 1]),
        (5, 100, [7]),
    ],
)
def test_a_block_has_the_rows_that_fit_its_elements_or_one(
    columns: int, elements: int, sizes: list[int]
) -> None:
    logits = torch.arange(35.0).view(7, 5)
    blocks = list(row_blocks(logits, Pieces(columns, elements)))
    assert [len(block) for _, block in blocks] == sizes
    assert torch.equal(torch.cat([block for _, block in blocks]), logits)
    assert all(torch.equal(logits[rows], block) for rows, block in blocks)


def test_a_part_without_columns_has_no_block() -> None:
    assert list(row_blocks(torch.zeros(3, 0), Pieces(4, 8))) == []


def test_the_moment_of_a_softmax_is_for_the_entropy_alone() -> None:
    block, _ = make(8, 3, 7)
    found = [online_softmax(block.detach(), 1.0, 4, torch.float64, entropy) for entropy in (False, True)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2].tolist() == [0.0, 0.0, 0.0]
    assert (found[1][2] < 0).all()
