"""The transformer: what it computes, not how fast."""

import math

import pytest
import torch
from torch import nn

from phalanx.models import transformer
from phalanx.models.transformer import Transformer, apply_rotary, rope_angles

SMALL = {"vocab_size": 61, "seq_len": 24, "layers": 2, "hidden_size": 32, "num_heads": 4}


def build(seed: int = 0, **changes: object) -> Transformer:
    torch.manual_seed(seed)
    return transformer(**{**SMALL, **changes}).eval()  # type: ignore[arg-type]


def tokens(batch: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def turns(length: int, dim: int) -> torch.Tensor:
    angles = rope_angles(length, dim, 10000.0, torch.device("cpu"))
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize(("activation", "matrices", "ffn"), [("swiglu", 3, 704), ("relu2", 2, 1024)])
def test_parameters_are_those_of_the_formula(activation: str, matrices: int, ffn: int) -> None:
    model = transformer(
        vocab_size=256, seq_len=8, layers=3, hidden_size=256, num_heads=4, num_kv_heads=2, activation=activation
    )  # type: ignore[arg-type]
    attention = 256 * 256 * 2 + 256 * 128 * 2 + 2 * 64
    expected = 256 * 256 + 3 * (attention + matrices * 256 * ffn + 2 * 256) + 256
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"activation": "relu2"}, {"qk_norm": False}])
def test_a_later_token_leaves_earlier_logits_alone(changes: dict[str, object]) -> None:
    model, first = build(**changes), tokens()
    second = first.clone()
    second[:, 15] = (second[:, 15] + 1) % 61
    with torch.no_grad():
        a, b = model(first), model(second)
    torch.testing.assert_close(a[:, :15], b[:, :15], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(a[:, 15], b[:, 15])


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_document_among_others_has_the_logits_of_the_document_alone(kv_heads: int) -> None:
    model, packed = build(num_kv_heads=kv_heads), tokens(1)
    documents = torch.tensor([[0] * 7 + [1] * 11 + [2] * 6], dtype=torch.int32)
    with torch.no_grad():
        together = model(packed, documents)
        for start, end in ((0, 7), (7, 18), (18, 24)):
            # Positions run on in the packed sequence: rotary attention sees only their differences.
            torch.testing.assert_close(together[:, start:end], model(packed[:, start:end]), rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_full_heads_with_repeated_weights() -> None:
    grouped, full = build(num_kv_heads=2), build(seed=5)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith(("key.weight", "value.weight"))]:
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-5, atol=1e-6)


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    model = transformer(vocab_size=64, seq_len=8, layers=8, hidden_size=128, num_heads=4)
    block = model.blocks[3]
    assert isinstance(block, nn.Module)
    depth = math.sqrt(2 * 8)
    for weight, expected in (
        (block.attention.query.weight, 0.02),
        (block.attention.out.weight, 0.02 / depth),
        (block.ffn.gate.weight, 0.02),
        (block.ffn.down.weight, 0.02 / depth),
        (model.embedding.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(expected, rel=0.05)


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 16).expand(1, 32, 1, 16), torch.randn(1, 1, 1, 16).expand(1, 32, 1, 16)
    scores = (
        apply_rotary(query.contiguous(), turns(32, 16)).squeeze()
        @ apply_rotary(key.contiguous(), turns(32, 16)).squeeze().T
    )
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_complex_and_real_rotations_agree() -> None:
    x = torch.randn(2, 32, 3, 16, generator=torch.Generator().manual_seed(0))
    angles = rope_angles(32, 16, 10000.0, torch.device("cpu"))
    torch.testing.assert_close(apply_rotary(x, turns(32, 16)), apply_rotary(x, (angles.cos(), angles.sin())))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "activation": "relu2", "num_kv_heads": 1, "dropout": 0.1}]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gradient_reaches_every_parameter(changes: dict[str, object], autocast: bool) -> None:
    model = build(**changes).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens())
    nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens(seed=2).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    with torch.no_grad():
        assert torch.equal(model(tokens()), model(tokens()))
        model.train()
        assert not torch.equal(model(tokens()), model(tokens()))


def test_a_meta_model_filled_later_is_the_model_built_at_once() -> None:
    with torch.device("meta"):
        late = transformer(**SMALL)  # type: ignore[arg-type]
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.reset_parameters()
    torch.manual_seed(0)
    at_once = build()
    torch.manual_seed(0)
    at_once.reset_parameters()
    with torch.no_grad():
        assert torch.equal(late.eval()(tokens()), at_once(tokens()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 30}, "hidden_size=30 must be a multiple of num_heads=4"),
        ({"hidden_size": 12}, "must be even"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"activation": "gelu"}, "'swiglu' or 'relu2'"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(**changes)


def test_an_input_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_len=24"):
        build()(tokens(1, 25))
