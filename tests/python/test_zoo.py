"""The zoo: every mechanism equals full attention (or its own quadratic definition) in its exactness limit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import dspattn
from dspattn import DspattnError, zoo

BATCH, HEADS, N, D = 2, 3, 50, 16
NAMES = [
    "full", "local", "sparse_transformer", "longformer", "bigbird", "linformer", "nystromformer", "reformer", "routing",
    "sinkhorn", "synthesizer", "linear_transformer", "performer", "top_k", "fixed",
]  # fmt: skip
# Settings in which a mechanism is full attention, for n = N; a mask of each kind must then act as full attention's.
EXACT: dict[str, dict[str, Any]] = {
    "full": {},
    "local": {"block": 8, "neighbours": 6},
    "sparse_transformer": {"stride": 1},
    "longformer": {"window": 2 * N, "global_tokens": 3},
    "bigbird": {"block": 8, "random": 7},
    "routing": {"clusters": 1},
    "sinkhorn": {"block": N},
    "top_k": {"k": N},
    "fixed": {"density": 1.0},
}
MASKED = [(name, kind) for name in EXACT for kind in ("key", "pair", "causal") if kind in zoo.MECHANISMS[name].masks]


def create(name: str, n: int = N, **options: Any) -> zoo.Mechanism:
    torch.manual_seed(1)
    return zoo.create(name, heads=HEADS, head_dim=D, n=n, **options).eval()


def inputs(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(BATCH, HEADS, n, D, generator=generator) for _ in range(3))
    return q, k, v


def full(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Full attention in float64; rows that see nothing give 0."""
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ v.double()).float()


def mask_of(kind: str, n: int = N) -> tuple[Tensor | None, bool, Tensor]:
    """The mask argument, is_causal, and both as one boolean [.., n, n]."""
    generator = torch.Generator().manual_seed(7)
    if kind == "causal":
        return None, True, torch.ones(n, n, dtype=torch.bool).tril()
    if kind == "key":
        mask = torch.rand(BATCH, 1, 1, n, generator=generator) > 0.4
        return mask, False, mask
    mask = torch.rand(BATCH, HEADS, n, n, generator=generator) > 0.4
    mask[0, 0, 5] = False  # a query that sees nothing
    return mask, False, mask


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_names() -> None:
    assert zoo.names() == NAMES


@pytest.mark.parametrize("name", EXACT)
def test_equals_full_attention_in_its_limit(name: str) -> None:
    q, k, v = inputs()
    close(create(name, **EXACT[name])(q, k, v), full(q, k, v))


@pytest.mark.parametrize(("name", "kind"), MASKED)
def test_masks_act_as_those_of_full_attention(name: str, kind: str) -> None:
    q, k, v = inputs()
    mask, is_causal, allowed = mask_of(kind)
    close(create(name, **EXACT[name])(q, k, v, mask, is_causal=is_causal), full(q, k, v, allowed))


def test_full_attention_with_both_masks() -> None:
    q, k, v = inputs()
    mask, _, allowed = mask_of("pair")
    close(create("full")(q, k, v, mask, is_causal=True), full(q, k, v, allowed & mask_of("causal")[2]))


# What is seen, from the definitions, at settings that leave much out.
def seen_by(name: str) -> tuple[dict[str, Any], Tensor]:
    i, j = torch.arange(N).unsqueeze(1), torch.arange(N)
    if name == "local":
        return {"block": 7, "neighbours": 1}, (i // 7 - j // 7).abs() <= 1
    if name == "sparse_transformer":
        return {"stride": 8, "summary": 2}, (i // 8 == j // 8) | (j % 8 == 0) | (j % 8 >= 6)
    if name == "longformer":
        return {"window": 10, "global_tokens": 2}, ((i - j).abs() <= 5) | (i < 2) | (j < 2)
    if name == "fixed":
        return {"columns": [3, 4, 40]}, (j == 3) | (j == 4) | (j == 40)
    options = {"block": 8, "random": 1, "seed": 5}
    table = dspattn.block_masks.bigbird(64 * 7, random=1, seed=5).block_map()
    return options, table.repeat_interleave(8, 0).repeat_interleave(8, 1)[:N, :N]


@pytest.mark.parametrize("kind", ["none", "key", "pair", "causal"])
@pytest.mark.parametrize("name", ["local", "sparse_transformer", "longformer", "bigbird", "fixed"])
def test_sees_what_its_definition_says(name: str, kind: str) -> None:
    q, k, v = inputs()
    options, seen = seen_by(name)
    mask, is_causal, allowed = (None, False, torch.tensor(True)) if kind == "none" else mask_of(kind)
    close(create(name, **options)(q, k, v, mask, is_causal=is_causal), full(q, k, v, seen & allowed))


@pytest.mark.parametrize("kind", ["none", "key", "pair", "causal"])
def test_sparse_transformer_with_heads_of_two_kinds(kind: str) -> None:
    q, k, v = inputs()
    i, j = torch.arange(N).unsqueeze(1), torch.arange(N)
    seen = torch.stack([i // 8 == j // 8] + [((j % 8 == 0) | (j % 8 >= 6)).expand(N, N)] * 2)
    mask, is_causal, allowed = (None, False, torch.tensor(True)) if kind == "none" else mask_of(kind)
    module = create("sparse_transformer", stride=8, summary=2, merged=False)
    close(module(q, k, v, mask, is_causal=is_causal), full(q, k, v, seen & allowed))


def test_top_k_sees_the_largest_scores() -> None:
    q, k, v = inputs()
    scores = q @ k.transpose(-1, -2)
    allowed = scores >= scores.topk(5, -1).values[..., -1:]
    close(create("top_k", k=5)(q, k, v), full(q, k, v, allowed))


@pytest.mark.parametrize("shared", [True, False])
def test_linformer_with_the_identity(shared: bool) -> None:
    q, k, v = inputs()
    module = create("linformer", rows=N, shared=shared)
    with torch.no_grad():
        for projection in module.parameters():
            projection.copy_(torch.eye(N))
    close(module(q, k, v), full(q, k, v))


def test_linformer_leaves_masked_keys_out() -> None:
    q, k, v = inputs()
    mask, _, _ = mask_of("key")
    assert mask is not None
    module = create("linformer", rows=8)
    other = torch.where(mask.transpose(-1, -2), k, 100.0), torch.where(mask.transpose(-1, -2), v, -100.0)
    torch.testing.assert_close(module(q, k, v, mask), module(q, *other, mask))


def test_nystromformer_with_every_landmark() -> None:
    # Queries that look for their own key: a matrix whose inverse float32 holds to 1e-5. That of independent queries and
    # keys has condition 3e4, and rounding alone then leaves 1e-4.
    _, k, v = inputs()
    module = create("nystromformer", landmarks=N, convolution=0, iterations=15)
    close(module(2 * k, k, v), full(2 * k, k, v))


def test_nystromformer_landmarks_convolution_and_inverse() -> None:
    q, k, v = inputs()
    module: Any = create("nystromformer", landmarks=13, convolution=5, iterations=25)
    segments = [range(start, min(start + 4, N)) for start in range(0, N, 4)]
    few_q, few_k = (torch.stack([t[:, :, list(s)].mean(2) for s in segments], 2) for t in (q, k))

    def weights(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().transpose(-1, -2) / math.sqrt(D)).softmax(-1)

    expected = weights(q, few_k) @ torch.linalg.pinv(weights(few_q, few_k)) @ weights(few_q, k) @ v.double()
    kernel = module.convolution.weight.double()[:, 0, :, 0]  # [heads, 5]
    padded = torch.nn.functional.pad(v.double(), (0, 0, 2, 2))
    for offset in range(5):
        expected = expected + kernel[:, offset].view(1, HEADS, 1, 1) * padded[:, :, offset : offset + N]
    # The inverse of a badly conditioned matrix: what is compared is limited by its condition, not by the iteration.
    close(module(q, k, v), expected.float(), 2e-3)


def test_nystromformer_leaves_masked_keys_out() -> None:
    q, k, v = inputs()
    mask = torch.ones(BATCH, 1, 1, N, dtype=torch.bool)
    mask[..., 30:] = False
    module = create("nystromformer", landmarks=13)
    keep = mask.transpose(-1, -2)
    first = module(q, k, v, mask)
    second = module(torch.where(keep, q, 9.0), torch.where(keep, k, 100.0), torch.where(keep, v, -100.0), mask)
    torch.testing.assert_close(first[:, :, :30], second[:, :, :30])
    assert torch.isfinite(first).all()


def reformer_definition(q: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Attention to the unit queries, each token's own only when it sees nothing else."""
    keys = q / q.norm(dim=-1, keepdim=True)
    others = ~torch.eye(q.shape[2], dtype=torch.bool)
    allowed = torch.ones_like(others) if allowed is None else allowed
    alone = ~(allowed & others).any(-1, keepdim=True)
    return full(q, keys, v, allowed & (others | alone))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("kind", ["none", "key", "causal"])
def test_reformer_with_one_bucket(kind: str, rounds: int) -> None:
    q, k, v = inputs()
    mask, is_causal, allowed = (None, False, None) if kind == "none" else mask_of(kind)
    if allowed is not None:
        allowed = allowed.expand(BATCH, HEADS, N, N)
    module = create("reformer", buckets=1, rounds=rounds)
    close(module(q, k, v, mask, is_causal=is_causal), reformer_definition(q, v, allowed))


def test_reformer_stays_within_its_bucket() -> None:
    q, k, v = inputs()
    module: Any = create("reformer", buckets=4, chunk=N)  # one chunk: all of a bucket is in reach
    buckets = torch.cat([q @ module.rotations[:, 0], -(q @ module.rotations[:, 0])], -1).argmax(-1)
    close(module(q, k, v), reformer_definition(q, v, buckets.unsqueeze(-1) == buckets.unsqueeze(-2)))


def test_routing_attends_within_clusters() -> None:
    q, k, v = inputs()
    module: Any = create("routing", clusters=4, members=20)
    expected = torch.zeros_like(v)
    times = torch.zeros(BATCH, HEADS, N, 1)
    for b in range(BATCH):
        for h in range(HEADS):
            for centre in module.centres[h]:
                rows, columns = (((t[b, h] @ centre) / t[b, h].norm(dim=-1)).topk(20).indices for t in (q, k))
                expected[b, h, rows] += full(q[b, h, rows], k[b, h, columns], v[b, h, columns])
                times[b, h, rows] += 1
    close(module(q, k, v), expected / times.clamp(min=1))


def test_routing_moves_its_centres_while_training_only() -> None:
    module: Any = create("routing", clusters=4)
    before = module.centres.clone()
    module(*inputs())
    assert torch.equal(module.centres, before)
    module.train()(*inputs())
    assert not torch.equal(module.centres, before)
    torch.testing.assert_close(module.centres.norm(dim=-1), torch.ones(HEADS, 4))


def test_sinkhorn_sorts_blocks() -> None:
    q, k, v = inputs()
    module: Any = create("sinkhorn", block=10, iterations=50)
    blocks_k, blocks_v = (t.view(BATCH, HEADS, 5, 10, D) for t in (k, v))
    matrix = module._matrix(blocks_k.sum(3))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(BATCH, HEADS, 5))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(BATCH, HEADS, 5), atol=1e-3, rtol=0)
    mixed_k, mixed_v = (torch.einsum("bhij,bhjrd->bhird", matrix, t) for t in (blocks_k, blocks_v))
    both = full(q.view(blocks_k.shape), torch.cat([mixed_k, blocks_k], 3), torch.cat([mixed_v, blocks_v], 3))
    close(module(q, k, v), both.flatten(2, 3))


def test_sinkhorn_leaves_masked_keys_out() -> None:
    q, k, v = inputs()
    mask, _, _ = mask_of("key")
    assert mask is not None
    module = create("sinkhorn", block=12)  # five blocks of 10
    keep = mask.transpose(-1, -2)
    torch.testing.assert_close(
        module(q, k, v, mask), module(q, torch.where(keep, k, 100.0), torch.where(keep, v, -100.0), mask)
    )


@pytest.mark.parametrize("kind", ["random", "factorized_random", "dense"])
@pytest.mark.parametrize("masked", ["none", "key", "pair", "causal"])
def test_synthesizer_is_its_definition(kind: str, masked: str) -> None:
    q, k, v = inputs()
    module: Any = create("synthesizer", kind=kind, rank=5)
    first, *rest = [factor.detach().double() for factor in module.factors]
    if kind == "random":
        made = first
    elif kind == "factorized_random":
        made = torch.einsum("hik,hkj->hij", first, rest[0])
    else:
        made = torch.einsum("bhie,hej->bhij", torch.einsum("bhid,hde->bhie", q.double(), first).clamp(min=0), rest[0])
    mask, is_causal, allowed = (None, False, torch.tensor(True)) if masked == "none" else mask_of(masked)
    weights = made.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    close(module(q, k, v, mask, is_causal=is_causal), (weights @ v.double()).float())


@pytest.mark.parametrize("kind", ["none", "key", "causal"])
def test_linear_transformer_is_its_quadratic_form(kind: str) -> None:
    q, k, v = inputs()
    mask, is_causal, allowed = (None, False, torch.tensor(True)) if kind == "none" else mask_of(kind)
    phi_q, phi_k = (torch.where(t > 0, t + 1, t.exp()).double() for t in (q, k))
    weights = (phi_q @ phi_k.transpose(-1, -2)) * allowed
    expected = (weights / weights.sum(-1, keepdim=True)) @ v.double()
    close(create("linear_transformer", chunk=16)(q, k, v, mask, is_causal=is_causal), expected.float())


@pytest.mark.parametrize("kind", ["none", "key", "causal"])
def test_performer_is_the_attention_of_its_kernel(kind: str) -> None:
    q, k, v = inputs()
    mask, is_causal, allowed = (None, False, torch.tensor(True)) if kind == "none" else mask_of(kind)
    module: Any = create("performer", features=40, epsilon=0.0, chunk=16)
    weights = module.kernel_estimate(q, k).double() * allowed
    expected = (weights / weights.sum(-1, keepdim=True)) @ v.double()
    close(module(q, k, v, mask, is_causal=is_causal), expected.float())


def gradients_of(module: zoo.Mechanism, run: Any, n: int) -> list[Tensor]:
    """The output and its gradients with respect to the inputs the mechanism uses and its parameters."""
    q, k, v = (t.requires_grad_() for t in inputs(n))
    used = [t for t, letter in ((q, "q"), (k, "k"), (v, "v")) if letter not in " ".join(module.unused)]
    out = run(q, k, v)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out, *torch.autograd.grad((out * direction).sum(), [*used, *module.parameters()])]


def compiled(module: zoo.Mechanism, backend: str) -> Any:
    torch._dynamo.reset()  # all mechanisms share one forward, and there is a limit to how often it is traced
    return torch.compile(module, backend=backend, fullgraph=True)


@pytest.mark.parametrize("name", NAMES)
def test_trains(name: str) -> None:
    module = create(name, n=60).train()
    for gradient in gradients_of(module, module, 60):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_is_traced_whole(name: str) -> None:
    module = create(name)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module, "eager")(*inputs()), module(*inputs()))


@pytest.mark.rare
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name: str, backend: str) -> None:
    module = create(name, n=60).train()
    twin = copy.deepcopy(module)
    expected, traced = gradients_of(module, module, 60), gradients_of(twin, compiled(twin, backend), 60)
    for one, other in zip(expected, traced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in inputs())
    module = create(name)
    out = module(q, k, v)
    assert out.dtype == dtype
    assert torch.isfinite(copy.deepcopy(module).to(dtype)(q, k, v)).all()  # parameters and buffers in 16 bits too
    assert module(q, k, v.clone().requires_grad_()).dtype == dtype
    if name not in ("reformer", "routing", "top_k"):  # whose choices may differ
        torch.testing.assert_close(out.float(), module(q.float(), k.float(), v.float()), rtol=0, atol=0.06)


def test_nystromformer_whatever_the_default_type() -> None:
    attention = zoo.create("nystromformer", heads=2, head_dim=8, n=64, landmarks=8)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    expected = attention(q, k, v)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(attention(q, k, v), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_errors_name_what_was_expected() -> None:
    q, k, v = inputs()
    with pytest.raises(DspattnError, match="name: expected one of full, local"):
        zoo.create("fool", heads=1, head_dim=1, n=1)
    with pytest.raises(DspattnError, match=r"rank: expected one of linformer's options \(grouping, pattern, rows"):
        create("linformer", rank=3)
    with pytest.raises(DspattnError, match="rows: expected a whole number >= 1, got 0"):
        create("linformer", rows=0)
    with pytest.raises(DspattnError, match=r"k: expected \[batch, 3, 50, 16\], got \[2, 3, 49, 16\]"):
        create("full")(q, k[:, :, 1:], v)
    with pytest.raises(DspattnError, match="mask: expected a boolean tensor"):
        create("full")(q, k, v, torch.zeros(1, 1, 1, N))
    with pytest.raises(DspattnError, match="is_causal: expected False, since linformer has no causal form"):
        create("linformer")(q, k, v, is_causal=True)
    with pytest.raises(DspattnError, match=r"mask: expected a mask of keys .*, the only kind routing defines"):
        create("routing")(q, k, v, torch.ones(1, 1, N, N, dtype=torch.bool))
    with pytest.raises(DspattnError, match="buckets: expected 1 or an even number, got 3"):
        create("reformer", buckets=3)


@pytest.mark.parametrize(
    "name,options,reason",
    [
        ("performer", {"seed": 1.5}, "seed: expected a 64-bit integer, got 1.5"),
        ("reformer", {"seed": None}, "seed: expected a 64-bit integer, got None"),
        ("routing", {"seed": True}, "seed: expected a 64-bit integer, got True"),
        ("routing", {"decay": 1.5}, r"decay: expected a number in \[0, 1\], got 1.5"),
        ("sinkhorn", {"temperature": 0}, "temperature: expected a finite number > 0, got 0"),
        ("fixed", {"density": "half"}, r"density: expected in \(0, 1\], got 'half'"),
        ("fixed", {"columns": 3}, "columns: expected a list of whole numbers, got 3"),
        ("longformer", {"block": "x"}, "block: expected 64 or 128, of pruned blocks, got 'x'"),
    ],
)
def test_settings_that_are_none_are_named(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DspattnError, match=reason):
        create(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_mask_kind_is_taken_or_refused(name: str) -> None:
    module = create(name)
    for kind in ("key", "pair", "causal"):
        mask, is_causal, _ = mask_of(kind)
        if kind in module.masks:
            assert torch.isfinite(module(*inputs(), mask, is_causal=is_causal)).all()
        else:
            with pytest.raises(DspattnError):
                module(*inputs(), mask, is_causal=is_causal)


class RefusesOtherDevices(TorchFunctionMode):
    """What PyTorch refuses where its default device is a GPU: numbers of a generator that is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            assert torch.device(kwargs.get("device") or "cuda") == kwargs["generator"].device
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [*zoo.names(), "bigbird 1:2", "longformer 1:2"])
def test_default_devices_and_types(name: str) -> None:
    """A mechanism is made where PyTorch makes modules, with the same numbers for a seed."""
    name, _, pattern = name.partition(" ")

    def made() -> zoo.Mechanism:
        return zoo.create(name, heads=2, head_dim=16, n=128, **({"pattern": pattern} if pattern else {}))

    with torch.device("meta"), RefusesOtherDevices():
        there = made()
    assert all(t.is_meta for t in (*there.parameters(), *there.buffers()))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        narrow = made()
    finally:
        torch.set_default_dtype(default)
    for (which, one), (_, other) in zip(made().named_buffers(), narrow.named_buffers(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-2, rtol=1e-2, msg=which)
