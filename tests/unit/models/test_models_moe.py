"""The mixture-of-experts transformer: what it computes and how it keeps its experts evenly used."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.models import moe, transformer
from phalanx.models.moe import GroupedExperts, MoE, MoETransformer, TopKRouter
from phalanx.models.transformer import FeedForward

SMALL = {
    "vocab_size": 61,
    "seq_len": 24,
    "layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_experts": 4,
    "top_k": 2,
    "expert_hidden_size": 24,
}
UNEVEN = (0.4, 0.3, 0.2, 0.1)

WARNINGS_OF_COMPILE = (  # of torch.compile's own doings, hidden in a way that warnings as errors do not heed
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
)


def build(seed: int = 0, load: tuple[float, ...] | None = None, **changes: object) -> MoETransformer:
    torch.manual_seed(seed)
    model = moe(**{**SMALL, **changes})  # type: ignore[arg-type]
    for router in routers(model):
        if load is not None:
            router.load.copy_(torch.tensor(load))
    return model


def routers(model: nn.Module) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def tokens(batch: int = 4, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_rows(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="sum")


def gradients(model: nn.Module, micro: int = 4) -> dict[str, Tensor]:
    """Gradients of the sum of losses of four sequences, `micro` of them at a time."""
    model.zero_grad()
    for x, y in zip(tokens().split(micro), tokens(seed=2).split(micro), strict=True):
        loss_sum(model, x, y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=rtol * float(other[name].abs().max()), msg=name)


def naive(mixture: MoE, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    outputs = []
    for row in x.flatten(0, -2):
        shares = (mixture.router.score.weight @ row).softmax(0)
        weights, chosen = shares.topk(mixture.router.top_k)
        if len(weights) > 1:
            weights = weights / weights.sum()
        out = torch.zeros_like(row) if mixture.shared is None else mixture.shared(row)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up, down = (w[e] for w in (mixture.experts.gate, mixture.experts.up, mixture.experts.down))
            out = out + weight * (down @ (F.silu(gate @ row) * (up @ row)))
        outputs.append(out)
    return torch.stack(outputs).view_as(x)


def test_by_default_a_tokens_experts_are_together_as_wide_as_the_feed_forward_of_the_transformer() -> None:
    mixture, dense = (
        build(vocab_size=256, seq_len=8, hidden_size=384, expert_hidden_size=None, top_k=4),
        transformer(vocab_size=256, seq_len=8, hidden_size=384),
    )
    assert isinstance(dense.blocks[0].ffn, FeedForward)
    assert 4 * mixture.blocks[0].ffn.experts.gate.shape[1] == dense.blocks[0].ffn.up.out_features


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("shared", [0, 16])
def test_every_token_is_computed_by_all_its_experts(top_k: int, shared: int) -> None:
    torch.manual_seed(0)
    mixture, x = MoE(32, 4, top_k, 24, shared, 0.0), random_rows(2, 9, 32)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    found, expected = mixture(x), naive(mixture, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = random_rows(2, 9, 32, seed=4)
    of_found = torch.autograd.grad((found * weights).sum(), list(mixture.parameters()))
    of_expected = torch.autograd.grad((expected * weights).sum(), list(mixture.parameters()))
    for a, b in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(5, 0, 7, 0), (0, 0, 12, 0), (0, 0, 0, 0)])
def test_experts_without_a_token_get_zero_gradients(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, x = GroupedExperts(4, 32, 24).to(dtype), random_rows(sum(counts), 32).to(dtype)
    out = experts(x, torch.tensor(counts))
    assert out.shape == x.shape
    (out * random_rows(*x.shape, seed=5).to(dtype)).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        for gradient, count in zip(parameter.grad, counts, strict=True):
            assert bool(gradient.abs().sum() > 0) == bool(count)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_product_for_all_experts_equals_the_loop(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    torch.manual_seed(0)
    experts = GroupedExperts(4, 32, 24).to(device, torch.bfloat16)
    results = []
    for grouped in (True, False):
        if not grouped:
            monkeypatch.delattr(F, "grouped_mm")
        x = random_rows(40, 32).to(device, torch.bfloat16).requires_grad_()
        out = experts(x, torch.tensor([11, 0, 28, 1], device=device))
        weights = random_rows(40, 32, seed=5).to(device, torch.bfloat16)
        results.append([out, *torch.autograd.grad((out * weights).sum(), [x, *experts.parameters()])])
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() / b.float().norm() < 0.01


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("top_k", [1, 2])
def test_gradients_do_not_depend_on_how_a_batch_is_divided(micro: int, top_k: int) -> None:
    model = build(load=UNEVEN, aux_loss_coef=1.0, top_k=top_k, shared_expert_hidden_size=16)
    assert_alike(gradients(model, micro), gradients(model))


def test_gradients_are_those_of_a_loss_with_the_balance_written_out() -> None:
    load = torch.tensor(UNEVEN)
    model, plain = build(load=UNEVEN, aux_loss_coef=0.5), build(aux_loss_coef=0.0)
    found, shares = gradients(model), []
    for router in routers(plain):
        router.score.register_forward_hook(lambda module, args, out: shares.append(out.softmax(-1)))
    balance = loss_sum(plain, tokens(), tokens(seed=2))
    for p in shares:
        balance = balance + 0.5 * 4 * (load * p).sum()
    plain.zero_grad()
    balance.backward()
    assert_alike(found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


def test_the_loss_scale_acts_on_the_balance_alone() -> None:
    model, balance = build(load=UNEVEN, aux_loss_coef=1.0), {}
    for scale in (0.0, 1.0, 8.0):
        for router in routers(model):
            router.loss_scale = scale
            assert router.loss_scale == scale
        balance[scale] = gradients(model)["blocks.1.ffn.router.score.weight"]
    torch.testing.assert_close(balance[8.0] - balance[0.0], 8 * (balance[1.0] - balance[0.0]), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings(*WARNINGS_OF_COMPILE)
def test_the_loss_scale_changes_without_compiling_again() -> None:
    torch.compiler.reset()
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    router, x = TopKRouter(32, 4, 2, 1.0).train(), random_rows(10, 32)
    compiled = torch.compile(router, backend=count, fullgraph=True)
    for scale in (1.0, 2.0, 65536.0):
        router.loss_scale = scale
        compiled(x)[0].sum().backward()
    assert len(graphs) == 1


def test_a_step_ends_with_the_shares_of_all_ranks_assignments() -> None:
    router = TopKRouter(32, 4, 2, 0.01).train()
    router.load.copy_(torch.tensor(UNEVEN))
    _, _, first = router(random_rows(10, 32))
    _, _, second = router(random_rows(7, 32, seed=4))
    elsewhere = torch.tensor([3, 0, 20, 1])
    assert torch.equal(router.counts, first + second)
    router.after_step(lambda counts: counts + elsewhere)
    total = first + second + elsewhere
    torch.testing.assert_close(router.load, total / total.sum())
    assert router.counts.sum() == 0
    router.after_step(lambda counts: counts)
    torch.testing.assert_close(router.load, total / total.sum())  # a step without tokens leaves it


def test_evaluation_is_not_counted() -> None:
    router = TopKRouter(32, 4, 2, 0.01).eval()
    router(random_rows(10, 32))
    assert router.counts.sum() == 0


def test_assignments_come_sorted_by_expert_and_equal_ones_in_order() -> None:
    router = TopKRouter(32, 4, 2, 0.01)
    x = random_rows(10, 32)
    weights, order, counts = router(x)
    chosen = router.score(x).topk(2).indices.flatten()
    assert torch.equal(chosen[order], chosen.sort().values)
    assert torch.equal(counts, chosen.bincount(minlength=4))
    for e in range(4):
        of_expert = order[chosen[order] == e]
        assert torch.equal(of_expert, of_expert.sort().values)
    torch.testing.assert_close(weights.sum(-1), torch.ones(10))


def test_with_one_expert_a_token_the_task_still_teaches_the_router() -> None:
    model = build(top_k=1, aux_loss_coef=0.0)
    assert gradients(model)["blocks.1.ffn.router.score.weight"].abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_neither_gradients_nor_shares(reentrant: bool) -> None:
    plain, again = build(load=UNEVEN, aux_loss_coef=1.0), build(load=UNEVEN, aux_loss_coef=1.0)
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=reentrant)
    assert_alike(gradients(plain, 2), gradients(again, 2), rtol=0)
    for one, other in zip(routers(plain), routers(again), strict=True):
        one.after_step(lambda counts: counts)
        other.after_step(lambda counts: counts)
        assert torch.equal(one.load, other.load)


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_evens_out_the_load(top_k: int) -> None:
    """From a router that sends nearly everything to one expert, for a task that does not care."""
    torch.manual_seed(0)
    router, x = TopKRouter(32, 4, top_k, 1.0).train(), random_rows(400, 32)
    x[:, 0] = 1.0
    with torch.no_grad():
        router.score.weight.normal_(std=0.02)[0, 0] = 0.3
    optimizer, tops = torch.optim.Adam(router.parameters(), lr=3e-3), []
    for _ in range(60):
        optimizer.zero_grad()
        (router(x)[0].sum() * 0).backward()
        optimizer.step()
        router.after_step(lambda counts: counts)
        tops.append(router.load.max().item())
    assert tops[0] > 0.9 / top_k
    assert tops[-1] < 0.27


@pytest.mark.filterwarnings(*WARNINGS_OF_COMPILE)
@pytest.mark.parametrize("bf16", [False, True])
def test_compiled_it_is_the_eager_model(bf16: bool) -> None:
    torch.compiler.reset()
    eager, compiled = build(load=UNEVEN, shared_expert_hidden_size=16), build(load=UNEVEN, shared_expert_hidden_size=16)
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert_alike(gradients(compiled), gradients(eager), rtol=0.02 if bf16 else 1e-5)
    for one, other in zip(routers(eager), routers(compiled), strict=True):
        assert torch.equal(one.counts, other.counts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "tie_embeddings": False,
            "shared_expert_hidden_size": 16,
            "dense_layers": 1,
            "dropout": 0.1,
            "num_kv_heads": 1,
        },
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gradient_reaches_every_parameter(changes: dict[str, object], autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = gradients(build(**changes).train())
    for name, _ in build(**changes).named_parameters():
        assert found[name].isfinite().all(), name
        assert found[name].abs().sum() > 0, name


def test_writers_into_the_residual_stream_start_smaller_with_depth() -> None:
    block = moe(vocab_size=64, seq_len=8, layers=8, hidden_size=128, num_heads=4, shared_expert_hidden_size=128).blocks[
        3
    ]
    assert isinstance(block.ffn, MoE)
    depth = math.sqrt(2 * 8)
    assert block.ffn.shared is not None
    for weight, expected in (
        (block.ffn.experts.gate, 0.02),
        (block.ffn.experts.up, 0.02),
        (block.ffn.experts.down, 0.02 / depth),
        (block.ffn.shared.down.weight, 0.02 / depth),
        (block.attention.out.weight, 0.02 / depth),
        (block.ffn.router.score.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(expected, rel=0.1)


def test_a_meta_model_filled_later_is_the_model_built_at_once() -> None:
    with torch.device("meta"):
        late = moe(**SMALL, shared_expert_hidden_size=16)  # type: ignore[arg-type]
    late.to_empty(device="cpu")
    at_once = build(shared_expert_hidden_size=16)
    for model in (late, at_once):
        torch.manual_seed(0)
        model.reset_parameters()
    for (name, a), (_, b) in zip(
        [*late.named_parameters(), *late.named_buffers()],
        [*at_once.named_parameters(), *at_once.named_buffers()],
        strict=True,
    ):
        assert torch.equal(a, b), name


def test_the_load_is_saved_and_what_is_counted_within_a_step_is_not() -> None:
    buffers = {name for name in build().state_dict() if "router" in name and "score" not in name}
    assert buffers == {"blocks.0.ffn.router.load", "blocks.1.ffn.router.load"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_k": 5}, "top_k=5 must be between 1 and num_experts=4"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"expert_hidden_size": 0}, "expert_hidden_size=0 must be at least 1"),
        ({"shared_expert_hidden_size": -1}, "shared_expert_hidden_size=-1"),
        ({"dense_layers": 2}, "dense_layers=2 must be at least 0 and below layers=2"),
        ({"aux_loss_coef": -0.1}, "aux_loss_coef=-0.1"),
        ({"hidden_size": 30}, "hidden_size=30 must be a multiple of num_heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(**changes)
