# SPDX-License-Identifier: Apache-2.0
"""What B12X_MLA_SPARSE takes for granted about the package `b12x`, checked against the installed package on a CPU.

Nothing here runs an SM12x kernel. Every name, field and keyword that the backend uses is exercised, through the backend's own
code where that is possible. A newer package that breaks one fails here with its name.
"""

import importlib.metadata
import inspect

import pytest
import torch
from packaging.version import Version

pytestmark = [pytest.mark.base("v0.33.0")]

import vllm.v1.attention.backends.mla.b12x_sparse_plans as plans  # noqa: E402

ROWS, TOPK, SMS = 8, 2048, 188


def geometry(cache_dtype="fp8_ds_mla", **more):
    values = dict(
        device=torch.device("cpu"),
        cache_dtype=cache_dtype,
        softmax_scale=0.07,
        topk=TOPK,
        query_heads=24,
        local_heads=8,
        return_lse=True,
        decode_rows=(1, ROWS),
        extend_rows=32,
        max_num_seqs=ROWS,
        gathered_rows=1024,
    )
    return plans.B12xGeometry(**{**values, **more})


@pytest.fixture
def kernels(monkeypatch, request):
    """The backend's plans, declared by the real package."""
    monkeypatch.setattr(plans, "num_compute_units", lambda index: SMS)
    return plans.B12xSparseMLA(geometry(getattr(request, "param", "fp8_ds_mla")))


def test_installed_package_is_new_enough():
    assert Version(importlib.metadata.version("b12x")) >= Version(plans.MIN_B12X_VERSION)


@pytest.mark.parametrize("module, name", [(module, name) for module, names in plans.B12X_NAMES.items() for name in names])
def test_name_exists(module, name):
    assert hasattr(plans.b12x_module(module), name), f"b12x has no {module}.{name}"


def test_only_an_sm12x_gpu_is_missing():
    """All but the last check of the refusal pass with the real package."""
    assert plans.b12x_refusal() == f"b12x {importlib.metadata.version('b12x')} finds no SM120 or SM121 GPU, or no CuTe DSL to use"


@pytest.mark.parametrize(
    "function, keywords",
    [
        ("bind", "scratch q kv_cache selected_indices cache_lengths selected_lengths"),
        ("run", ""),
        ("plan", ""),
    ],
)
def test_signature_binds(function, keywords):
    signature = inspect.signature(getattr(plans.b12x_module(plans._API), function))
    signature.bind(None, **dict.fromkeys(keywords.split()))


def test_preparation_binds(kernels):
    preparation = plans.b12x_module(plans._PREPARATION)
    inspect.signature(preparation.PreparationSession).bind(device=None, autotune=False, compile_workers=0)
    inspect.signature(preparation.PreparationSession.prepare).bind(None, [])
    request = kernels.extend.plan.request(name="name", prepare_call=lambda state: preparation.PreparedCall(run=lambda: None))
    assert request.plan is kernels.extend.plan
    assert request.prepare_call(None).invoke() is None


def test_a_session_opens_as_the_backend_opens_it():
    preparation = plans.b12x_module(plans._PREPARATION)
    session = preparation.PreparationSession(device=torch.device("cpu"), autotune=False, compile_workers=0)
    assert session.autotune is False and session.compile_workers == 0


# ------------------------------------------------------------------------------------------------ declarations


@pytest.mark.parametrize(
    "kernels, record, scale_format, fp8_rope, per_token",
    [
        ("fp8_ds_mla", 656, 1, False, False),
        ("nvfp4_ds_mla", 368, 2, True, True),
    ],
    indirect=["kernels"],
)
def test_declared_query(kernels, record, scale_format, fp8_rope, per_token):
    seen = {plan.name: plan.plan.query for plan in kernels.plans}
    assert list(seen) == ["decode.1", "decode.8", "extend", "gathered"]
    for query in seen.values():
        assert (query.cache_record_bytes, query.scale_format, query.fp8_rope, query.latent_scale_per_token) == (record, scale_format, fp8_rope, per_token)
        assert (query.model_type, query.qk_head_dim, query.v_head_dim, query.page_size, query.max_width) == (1, 576, 512, 64, TOPK)
        assert (query.dtype, query.kv_dtype, query.has_attention_sink, query.head_major_output) == ("bfloat16", "uint8", False, False)
    assert [(q.mode, q.num_q_heads, q.max_q_rows) for q in seen.values()] == [("decode", 24, 1), ("decode", 24, ROWS), ("extend", 24, 32), ("extend", 8, 32)]
    assert (seen["gathered"].max_kv_rows, seen["gathered"].max_page_table_width) == (1024, 16)


def test_caps_refuse_a_record_of_another_size(monkeypatch):
    """The package itself compares the record that the cache has with the one that it reads."""
    monkeypatch.setattr(plans, "num_compute_units", lambda index: SMS)
    monkeypatch.setitem(plans.RECORD_FORMATS, "nvfp4_ds_mla", plans.RecordFormat(352, 2, True, True, True))
    with pytest.raises(ValueError, match="expected 368"):
        plans.B12xSparseMLA(geometry("nvfp4_ds_mla"))


@pytest.mark.parametrize("kernels", ["fp8_ds_mla", "nvfp4_ds_mla"], indirect=True)
@pytest.mark.parametrize("name", ["decode.8", "extend", "gathered"])
@pytest.mark.parametrize("wrong", [None, "slots", "counts", "lengths", "heads", "width", "record", "rows", "scratch"])
def test_tensors_pass_the_packages_own_checks(kernels, name, wrong):
    """What `bind` checks of every tensor, on the CPU: `bind` itself wants a prepared plan, which wants a GPU."""
    from b12x.attention.sparse_mla._scratch import plan_sparse_mla_scratch

    (plan,) = [plan for plan in kernels.plans if plan.name == name]
    rows = 2
    tensors = dict(
        scratch=torch.empty(plan.scratch_bytes, dtype=torch.uint8),
        q=torch.empty((rows, plan.heads, 576), dtype=torch.bfloat16),
        kv_cache=torch.empty((3, 64, kernels.record.record_bytes), dtype=torch.uint8),
        selected_indices=torch.empty((rows, TOPK), dtype=torch.int32),
        cache_seqlens_int32=torch.empty(rows, dtype=torch.int32),
        nsa_cache_seqlens_int32=torch.empty(rows, dtype=torch.int32),
    )
    spoil = {
        "slots": ("selected_indices", lambda t: t.long()),
        "counts": ("nsa_cache_seqlens_int32", lambda t: t.long()),
        "lengths": ("cache_seqlens_int32", lambda t: t.long()),
        "heads": ("q", lambda t: t[:, :-1].contiguous()),
        "width": ("selected_indices", lambda t: t[:, :512].contiguous()),
        "record": ("kv_cache", lambda t: t[..., :352].contiguous()),
        "rows": ("nsa_cache_seqlens_int32", lambda t: t[:1]),
        "scratch": ("scratch", lambda t: t[:-1]),
    }
    if wrong is not None:
        key, change = spoil[wrong]
        tensors[key] = change(tensors[key])
    caps = _caps(plan)
    # The declaration has no other way to its caps than building them again.
    assert plan_sparse_mla_scratch(caps).scratch_specs() == plan.plan.scratch_specs()
    if wrong is None:
        binding = plan_sparse_mla_scratch(caps).bind(**tensors)
        assert binding.scratch.output_buffer.dtype == torch.bfloat16
        assert binding.scratch.output_buffer.shape[1:] == (plan.heads, 512) and binding.scratch.final_lse.shape[1:] == (plan.heads,)
        assert binding.scratch.final_lse.dtype == torch.float32
    else:
        with pytest.raises((TypeError, ValueError)):
            plan_sparse_mla_scratch(caps).bind(**tensors)


def _caps(plan):
    """The Caps that the declaration closed over."""
    materialize = plan.plan._materialize
    cells = dict(zip(materialize.__code__.co_freevars, (cell.cell_contents for cell in materialize.__closure__), strict=True))
    return cells["caps"]


# ------------------------------------------------------------------------------------------------ habits of the kernels


def test_decode_launch_keeps_the_rows_and_splits_of_its_first_run(kernels):
    """Why a plan is first run full: the package's launch record takes its rows from the first query."""
    from b12x.attention._shared.mla.kernel import prepare_unified_decode_launch
    from b12x.attention.sparse_mla._scratch import plan_sparse_mla_scratch

    plan = kernels.decode[1]
    caps = _caps(plan)
    scratch = (
        plan_sparse_mla_scratch(caps)
        .bind(
            scratch=torch.empty(plan.scratch_bytes, dtype=torch.uint8),
            q=torch.empty((ROWS, 24, 576), dtype=torch.bfloat16),
            selected_indices=torch.empty((ROWS, TOPK), dtype=torch.int32),
            cache_seqlens_int32=torch.empty(ROWS, dtype=torch.int32),
            nsa_cache_seqlens_int32=torch.empty(ROWS, dtype=torch.int32),
        )
        .scratch
    )
    for rows in (2, ROWS):
        launch = prepare_unified_decode_launch(
            q_all=torch.empty((rows, 24, 576), dtype=torch.bfloat16),
            swa_k_cache=torch.empty((1, 64, 656), dtype=torch.uint8),
            swa_indices=torch.empty((rows, TOPK), dtype=torch.int32),
            workspace=scratch,
            swa_page_size=64,
            sm_count=SMS,
            model_type_override=1,
            scale_format_override=1,
        )
        assert launch.rows == rows and launch.topk == TOPK and 1 <= launch.num_splits <= caps.max_chunks_per_row


@pytest.mark.parametrize("sms", [48, 188])
@pytest.mark.parametrize("topk", [512, 1024, 2048])
@pytest.mark.parametrize("heads", [8, 16, 24, 64, 128])
def test_room_for_the_splits_that_the_package_chooses(sms, topk, heads):
    """`max_decode_splits` against the package's heuristic, which knows no limit here."""
    from b12x.attention._shared.mla.kernel import plan_unified_decode_splits

    blocks_of_a_row = -(-heads // 16)
    for rows in (1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 256, 512, 1024):
        room = plans.max_decode_splits(rows, heads, topk, sms)
        _, wanted, _ = plan_unified_decode_splits(topk=topk, max_chunks=64, num_tokens=rows, h_blocks=blocks_of_a_row, sm_count=sms)
        _, given, _ = plan_unified_decode_splits(topk=topk, max_chunks=room, num_tokens=rows, h_blocks=blocks_of_a_row, sm_count=sms)
        if rows * blocks_of_a_row <= 3 * sms:
            assert wanted == given <= room
        else:
            # Above three waves the heuristic falls back to the most splits: no use, and gigabytes of partial outputs.
            assert (wanted, given, room) == (topk // 64, 1, 1)


def test_extend_always_returns_an_lse_in_base_2():
    """Read from the package's code, since nothing can run it here: see `B12xSparseMLA._run`."""
    from b12x.attention._shared.mla import prefill
    from b12x.attention.sparse_mla import _preparation

    extend = inspect.getsource(_preparation._SparseMlaState.run).split("run_unified_prefill(", 1)[1]
    assert "lse_scale" not in extend and "lse_out=" in extend
    assert "lse_scale" not in inspect.signature(prefill.run_unified_prefill).parameters
    assert "Returns (O[T, heads, D_V=512] bf16, lse[T, heads] f32 base-2)" in prefill.run_unified_prefill.__doc__
    decode = inspect.getsource(_preparation._SparseMlaState.run).split("run_unified_prefill(", 1)[0]
    assert "lse_scale=self.caps.lse_scale" in decode


@pytest.mark.parametrize("topk", plans.TOPK_WIDTHS)
@pytest.mark.parametrize("record", plans.RECORD_FORMATS.values(), ids=plans.RECORD_FORMATS)
@pytest.mark.parametrize("heads", [8, 24, 128])
def test_extend_dispatches_these_shapes(monkeypatch, topk, record, heads):
    """The package's own dispatcher, with its launch replaced: it raises for shapes that no kernel has."""
    from b12x.attention._shared.mla import prefill, prefill_mg

    launches = []
    monkeypatch.setattr(prefill_mg, "run_unified_prefill_mg", lambda **kwargs: launches.append(kwargs))

    def dispatch(topk=topk, heads=heads):
        return prefill.run_unified_prefill(
            q=torch.empty((2, heads, 576), dtype=torch.bfloat16),
            kv_cache=torch.empty((1, 64, record.record_bytes), dtype=torch.uint8),
            topk_indices=torch.empty((2, topk), dtype=torch.int32),
            sm_scale=1.0,
            page_block_size=64,
            topk_length=torch.empty(2, dtype=torch.int32),
            model_type=1,
            scale_format=record.scale_format,
            fp8_rope=record.fp8_rope,
            latent_scale_per_token=record.latent_scale_per_token,
            mg_enabled=True,
        )

    out, lse = dispatch()
    assert out.shape == (2, heads, 512) and lse.shape == (2, heads) and launches
    with pytest.raises(ValueError):
        dispatch(topk=topk + 64)
    with pytest.raises(ValueError):
        dispatch(heads=heads + 4)


# ------------------------------------------------------------------------------------------------ records


def test_reference_agrees_with_float64_attention():
    """Before it stands in for a kernel elsewhere: the package's reference, its LSE in base 2 and its record of 656 bytes."""
    from b12x.attention._shared.mla.reference import pack_mla_kv_cache_reference, sparse_mla_reference

    generator = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(200, 512, generator=generator).bfloat16(), torch.randn(200, 64, generator=generator).bfloat16()
    records = pack_mla_kv_cache_reference(latent, rope)
    groups = records[:, 0, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    keys = torch.cat([(groups * records[:, 0, 512:528].contiguous().view(torch.float32).double()[:, :, None]).view(-1, 512), rope.double()], 1)
    assert (keys[:, :512] - latent.double()).abs().max() < 0.15
    q = torch.randn(3, 8, 576, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(200, generator=generator)[:128] for _ in range(3)]).int()
    counts = torch.tensor([128, 5, 0], dtype=torch.int32)
    out, lse = sparse_mla_reference(q_all=q, kv_cache=records, page_table_1=ids, active_token_counts=counts, sm_scale=0.05, v_head_dim=512, return_lse=True)
    for row, count in enumerate(counts.tolist()):
        scores = q[row].double() @ keys[ids[row, :count].long()].T * 0.05
        expected = torch.softmax(scores, -1) @ keys[ids[row, :count].long(), :512]
        assert (out[row].double() - expected).abs().max() < 1e-2
        if count:
            torch.testing.assert_close(lse[row].double(), torch.logsumexp(scores, -1) / torch.log(torch.tensor(2.0).double()), rtol=1e-5, atol=1e-5)
        else:
            assert (lse[row] == -torch.inf).all()


def test_layout_of_the_nvfp4_record():
    from b12x.attention._shared.mla import kv_cache, traits

    record = traits.make_unified_traits(traits.ModelType.GLM_NSA, traits.ComputeMode.BF16, traits.ScaleFormat.NVFP4_E4M3, fp8_rope=True, latent_scale_per_token=True)
    assert (record.kv_gmem_stride, record.rope_gmem_offset, record.rope_payload_bytes, record.rope_scale_offset) == (368, 304, 64, 288)
    assert record.latent_scale_per_token and record.d_nope == 512 and record.d_rope == 64
    assert (kv_cache._RECORD_BYTES, kv_cache._NOPE_BYTES, kv_cache._SCALE_BYTES, kv_cache._ROPE_OFFSET) == (368, 256, 32, 304)
    assert plans.RECORD_FORMATS["nvfp4_ds_mla"].scale_format == traits.ScaleFormat.NVFP4_E4M3
    assert plans.RECORD_FORMATS["fp8_ds_mla"].scale_format == traits.ScaleFormat.ARBITRARY_FP32


@pytest.mark.parametrize(
    "wrong, message",
    [
        (None, "must be on CUDA"),
        ("record", "368"),
        ("slots", "int64"),
        ("rope", "k_pe must be"),
    ],
)
def test_writer_takes_these_tensors(wrong, message):
    """The writer checks shapes, dtypes and strides first and the device last: that is how far a CPU gets."""
    arguments = [
        torch.zeros((3, 512), dtype=torch.bfloat16),
        torch.zeros((3, 64), dtype=torch.bfloat16),
        torch.zeros((2, 64, 368 if wrong != "record" else 352), dtype=torch.uint8),
        torch.zeros(3, dtype=torch.int64 if wrong != "slots" else torch.int32),
    ]
    if wrong == "rope":
        arguments[1] = arguments[1][:, None]
    with pytest.raises((TypeError, ValueError), match=message):
        plans.write_nvfp4_records(*arguments)
