# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels that the sparse MLA path stands on, each against a float64 reference that is spelled out here.

A cache of fp8_ds_mla records is written, read back and attended; indexer scores come from DeepGEMM. Tolerances are stated
beside each comparison, with the largest error seen printed (`pytest -s`).
"""
import math

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.base("v0.33.0"),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10), reason="needs an SM90 or SM100 GPU"),
]

NOPE, ROPE, GROUP, BLOCK = 512, 64, 128, 64
RECORD = NOPE + 4 * (NOPE // GROUP) + 2 * ROPE  # 656 bytes: fp8 values, a float32 scale for each 128, bf16 rope
SCALE = (128 + ROPE) ** -0.5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def report(what: str, got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest absolute difference, printed."""
    error = (got.double() - wanted.double()).abs().max().item()
    print(f"{what}: largest error {error:.2e}, largest value {wanted.double().abs().max().item():.2f}")
    assert math.isfinite(error), f"{what}: not finite"
    return error


def read_record(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) in float64 of every record of a cache of bytes, in slot order: [slots, 576], [slots, 4]."""
    flat = cache.reshape(-1, RECORD)
    scales = flat[:, NOPE : NOPE + 16].contiguous().view(torch.float32).double()
    nope = flat[:, :NOPE].contiguous().view(torch.float8_e4m3fn).double() * scales.repeat_interleave(GROUP, 1)
    rope = flat[:, NOPE + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat([nope, rope], 1), scales


def written_cache(tokens: int, blocks: int, seed: int = 0):
    """A cache written by the kernel at random slots: (bytes, slots, latent, rope)."""
    from vllm import _custom_ops as ops

    latent = randn(tokens, NOPE, seed=seed).to(torch.bfloat16)
    rope = randn(tokens, ROPE, seed=seed + 1).to(torch.bfloat16)
    cache = torch.zeros(blocks, BLOCK, RECORD, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(blocks * BLOCK, generator=torch.Generator().manual_seed(seed))[:tokens].cuda()
    ops.concat_and_cache_mla(latent, rope, cache, slots, "fp8_ds_mla", torch.ones(1, device="cuda"))
    torch.accelerator.synchronize()
    return cache, slots, latent, rope


def attention(q: torch.Tensor, kv: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, natural log-sum-exp) in float64: row t attends kv[ids[t, :lengths[t]]], ids below 0 left out. An empty row: 0 and -inf."""
    q, kv = q.double(), kv.double()
    valid = (ids >= 0) & (ids < kv.shape[0])
    if lengths is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
    keys = kv[ids.clamp(0, kv.shape[0] - 1).long()]  # [rows, top-k, 576]
    scores = torch.einsum("thd,tkd->thk", q, keys) * SCALE
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.nan_to_num((scores - lse[..., None]).exp(), nan=0.0)
    return torch.einsum("thk,tkv->thv", weights, keys[..., :NOPE]), lse


def random_ids(rows: int, top_k: int, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids for each row, the valid ones in front, then -1; row 0 has one, row 1 all. Returns (ids, counts)."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, min(top_k, slots) + 1, (rows,), generator=generator)
    counts[0], counts[1] = 1, min(top_k, slots)
    ids = torch.full((rows, top_k), -1, dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        ids[row, :count] = torch.randperm(slots, generator=generator)[:count].int()
    return ids.cuda(), counts.int().cuda()


def test_cache_is_written_and_read_back():
    cache, slots, latent, rope = written_cache(1000, 20)
    values, scales = read_record(cache)
    assert torch.equal(values[slots, NOPE:], rope.double()), "the rope part is not copied bit for bit"
    amax = latent.double().reshape(-1, 4, GROUP).abs().amax(-1)
    assert bool((scales[slots] >= amax / 448 * (1 - 1e-6)).all()), "a scale is too small for its group: values are clipped"
    assert bool((scales[slots] <= 2.01 * amax / 448).all()), "a scale is more than one power of two too large"
    error = (values[slots, :NOPE] - latent.double()).abs()
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale below the normal range.
    bound = latent.double().abs() * 2**-4 + scales[slots].repeat_interleave(GROUP, 1) * 2**-10
    report("cache write, latent", values[slots, :NOPE], latent)
    assert bool((error <= bound * (1 + 1e-6)).all())
    untouched = torch.ones(20 * BLOCK, dtype=torch.bool, device="cuda")
    untouched[slots] = False
    assert not cache.reshape(-1, RECORD)[untouched].any(), "a slot that nobody wrote has changed"


def test_negative_slots_are_not_written():
    from vllm import _custom_ops as ops

    cache = torch.zeros(2, BLOCK, RECORD, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([-1, 5, -1], device="cuda")
    ops.concat_and_cache_mla(randn(3, NOPE).to(torch.bfloat16), randn(3, ROPE).to(torch.bfloat16), cache, slots, "fp8_ds_mla", torch.ones(1, device="cuda"))
    assert cache.reshape(-1, RECORD).any(1).nonzero().flatten().tolist() == [5]


def test_upconvert_reads_the_cache():
    from vllm import _custom_ops as ops

    lengths = [256, 1, 65, 130]
    cache, *_ = written_cache(20 * BLOCK, 20)
    table = torch.zeros(len(lengths), 4, dtype=torch.int32)
    free = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    for request, length in enumerate(lengths):
        for block in range(-(-length // BLOCK)):
            table[request, block] = free.pop()
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))], dtype=torch.int32, device="cuda")
    got = torch.full((sum(lengths), NOPE + ROPE), float("nan"), dtype=torch.bfloat16, device="cuda")
    ops.cp_gather_and_upconvert_fp8_kv_cache(cache, got, table.cuda(), starts, len(lengths))
    rows = torch.cat([table[r, torch.arange(n) // BLOCK].long() * BLOCK + torch.arange(n) % BLOCK for r, n in enumerate(lengths)]).cuda()
    wanted = read_record(cache)[0][rows]
    report("upconvert", got, wanted)
    # fp8 times a power of two fits into bf16: exact.
    assert torch.equal(got.double(), wanted)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_flashmla_sparse_bf16(heads, with_lengths):
    from vllm.v1.attention.ops import flashmla

    kv = randn(2048, 1, NOPE + ROPE, seed=5).to(torch.bfloat16)
    q = randn(96, heads, NOPE + ROPE, seed=6).to(torch.bfloat16)
    ids, counts = random_ids(96, 512, 2048)
    lengths = None
    if with_lengths:  # what stands behind the length does not count, even if it is a valid id
        lengths = counts
        ids = torch.where(ids < 0, torch.zeros_like(ids), ids)
    out, _, lse = flashmla.flash_mla_sparse_fwd(q, kv, ids[:, None].contiguous(), SCALE, topk_length=lengths)
    wanted, wanted_lse = attention(q, kv[:, 0], ids, lengths)
    # bf16 inputs and outputs: half a step is 2^-9 of values up to about 4; P in bf16 adds as much.
    assert report(f"FlashMLA sparse bf16, {heads} heads", out, wanted) < 2e-2
    check_lse(lse, wanted_lse)


def check_lse(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Natural or base-2 logarithm; the error is that of the first."""
    got = got.double()
    natural, binary = (got - wanted).abs().max().item(), (got * math.log(2) - wanted).abs().max().item()
    print(f"log-sum-exp: largest error {min(natural, binary):.2e} ({'natural' if natural <= binary else 'base 2'})")
    assert min(natural, binary) < 1e-2


@pytest.mark.parametrize("heads", [64, 128])
def test_flashmla_sparse_fp8(heads):
    from vllm.v1.attention.ops import flashmla

    rows = 32
    cache, *_ = written_cache(20 * BLOCK, 20, seed=9)
    q = randn(rows, heads, NOPE + ROPE, seed=10).to(torch.bfloat16)
    ids, _ = random_ids(rows, 512, 20 * BLOCK, seed=11)
    schedule, _ = flashmla.get_mla_metadata()
    out, lse = flashmla.flash_mla_with_kvcache(
        q=q[None], k_cache=cache[:, :, None], block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"), head_dim_v=NOPE,
        cache_seqlens=torch.tensor([20 * BLOCK], dtype=torch.int32, device="cuda"), tile_scheduler_metadata=schedule, is_fp8_kvcache=True,
        indices=ids[None], softmax_scale=SCALE,
    )  # fmt: skip
    wanted, wanted_lse = attention(q, read_record(cache)[0], ids)
    assert report(f"FlashMLA sparse fp8, {heads} heads", out[0], wanted) < 2e-2
    check_lse(lse[0].transpose(0, 1), wanted_lse)


def deep_gemm():
    from vllm.utils import deep_gemm as module
    from vllm.utils.import_utils import has_deep_gemm

    if not has_deep_gemm():
        pytest.fail("DeepGEMM is not importable")
    if module.mqa_logits_use_mx_scales():
        pytest.skip("SM100 takes other inputs; this test writes those of SM90")
    return module


def fp8_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 values, float32 scale of each row), scales powers of two."""
    scale = torch.exp2(torch.ceil(torch.log2(keys.float().abs().amax(-1).clamp(1e-4) / 448)))
    return (keys.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Indexer scores in float64: sum over heads of weight * relu(q . k). q [rows, heads, 128], keys [n, 128] -> [rows, n]."""
    return (torch.einsum("thd,nd->thn", q.double(), keys.double()).relu() * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize("heads", [32, 64])
def test_deepgemm_logits(heads):
    """Rows of a chunk with context: row i sees keys [start, end) and its scores stand from column 0 on."""
    module = deep_gemm()
    rows, count = 128, 1024
    q = randn(rows, heads, 128, seed=20).to(torch.float8_e4m3fn)
    keys, scale = fp8_keys(randn(count, 128, seed=21))
    weights = randn(rows, heads, seed=22)
    starts = torch.where(torch.arange(rows) < 64, 0, 300).int()
    ends = (starts + 200 + torch.arange(rows) * 3).clamp(max=count).int()
    widest = int((ends - starts).max())
    got = module.fp8_fp4_mqa_logits((q, None), (keys, scale), weights, starts.cuda(), ends.cuda(), widest)
    assert got.shape == (rows, widest)
    every = scores(q, keys.double() * scale.double()[:, None], weights)
    valid = torch.arange(widest)[None] < (ends - starts)[:, None]
    columns = (starts[:, None] + torch.arange(widest)[None]).clamp(max=count - 1).long().cuda()
    wanted = every.gather(1, columns)[valid.cuda()]
    # fp8 products are exact; the sums are float32 over 128 products and the heads, of magnitude up to a few hundred.
    assert report(f"DeepGEMM logits, {heads} heads", got[valid.cuda()], wanted) < 1e-3 * wanted.abs().max().item()


def test_deepgemm_paged_logits():
    module = deep_gemm()
    requests, heads, blocks, widest = 4, 64, 40, 1024
    context = torch.tensor([1, 64, 65, 777], dtype=torch.int32)
    keys, scale = fp8_keys(randn(blocks, BLOCK, 128, seed=30))
    cache = torch.empty(blocks, BLOCK * 132, dtype=torch.uint8, device="cuda")
    cache[:, : BLOCK * 128] = keys.reshape(blocks, -1).view(torch.uint8)
    cache[:, BLOCK * 128 :] = scale.contiguous().view(torch.uint8)
    table = torch.zeros(requests, widest // BLOCK, dtype=torch.int32)
    free = torch.randperm(blocks, generator=torch.Generator().manual_seed(31)).tolist()
    for request, length in enumerate(context.tolist()):
        for block in range(-(-length // BLOCK)):
            table[request, block] = free.pop()
    q = randn(requests, 1, heads, 128, seed=32).to(torch.float8_e4m3fn)
    weights = randn(requests, heads, seed=33)
    lengths = context[:, None].contiguous().cuda()
    plan = module.get_paged_mqa_logits_metadata(lengths, BLOCK, module.get_num_sms())
    got = module.fp8_fp4_paged_mqa_logits((q, None), cache.view(blocks, BLOCK, 1, 132), weights, lengths, table.cuda(), plan, widest)
    exact = keys.double() * scale.double()[..., None]
    for request, length in enumerate(context.tolist()):
        rows = exact[table[request].long().cuda()].reshape(-1, 128)[:length]
        wanted = scores(q[request], rows, weights[request : request + 1])
        assert report(f"DeepGEMM paged logits, context {length}", got[request : request + 1, :length], wanted) < 1e-3 * max(1.0, wanted.abs().max().item())


def test_top_k_of_logits():
    """The prefill top-k gives the same set as torch.topk; short rows end in -1."""
    from vllm import _custom_ops as ops

    rows, count, top_k = 64, 4096, 512
    logits = randn(rows, count, seed=40)
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ends = torch.linspace(1, count, rows).int().cuda()
    got = torch.full((rows, top_k), -7, dtype=torch.int32, device="cuda")
    ops.top_k_per_row_prefill(logits, starts, ends, got, rows, logits.stride(0), logits.stride(1), top_k)
    for row, end in enumerate(ends.tolist()):
        wanted = set(logits[row, :end].topk(min(top_k, end)).indices.tolist())
        assert {i for i in got[row].tolist() if i >= 0} == wanted, f"row {row} of {end} keys"
        assert (got[row] >= 0).sum() == len(wanted)
