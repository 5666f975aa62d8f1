# SPDX-License-Identifier: Apache-2.0
"""When B12X_MLA_SPARSE is chosen, why it is refused, and what the layers do differently for it. On a CPU, for other GPUs."""

import importlib.metadata
import sys
import types
from types import SimpleNamespace as NS

import pytest
import torch

from tests.gpu._ckv_ranks import current_config

pytestmark = [pytest.mark.base("v0.33.0")]

import vllm.v1.attention.backends.mla.b12x_sparse_plans as plans  # noqa: E402

with pytest.MonkeyPatch.context() as without_extension:
    # The platform's module imports the compiled extension, of which nothing here needs a function.
    without_extension.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    import vllm.platforms.cuda  # noqa: F401
from vllm.platforms.cuda import CudaPlatformBase, _get_backend_priorities  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseBackend as Backend  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

SM120, SM121, SM90, SM100 = (DeviceCapability(*c) for c in ((12, 0), (12, 1), (9, 0), (10, 0)))


def config(**text):
    text = NS(**{**dict(index_topk=2048, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64), **text})
    return NS(
        model_config=NS(hf_text_config=text),
        attention_config=NS(hisparse_config=None),
        parallel_config=NS(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        cache_config=NS(cache_dtype="auto"),
    )


def selector(**more):
    return AttentionSelectorConfig(
        **{
            **dict(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True, use_sparse=True, use_dcp=True),
            **more,
        }
    )


def reasons(capability=SM120, vllm_config=None, **more):
    with current_config(vllm_config or config()):
        return Backend.validate_configuration(device_capability=capability, **selector(**more)._asdict())


@pytest.fixture
def package(monkeypatch):
    """The installed package, on a GPU that it supports."""
    monkeypatch.setattr(plans.b12x_module(plans._API), "is_supported", lambda device=None: True)


def test_registered():
    assert AttentionBackendEnum["B12X_MLA_SPARSE"].get_class() is Backend and Backend.get_name() == "B12X_MLA_SPARSE"
    assert Backend.is_mla() and Backend.is_sparse() and Backend.supports_dcp() and not Backend.supports_pcp()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("capability", [SM120, SM121])
@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("more", [{}, {"use_dcp": False}, {"block_size": 64}, {"block_size": 256}])
def test_accepted(package, capability, dtype, more):
    assert reasons(capability, kv_cache_dtype=dtype, **more) == []


@pytest.mark.parametrize(
    "more, reason",
    [
        (dict(capability=SM90), "compute capability not supported"),
        (dict(capability=SM100), "compute capability not supported"),
        (dict(capability=DeviceCapability(12, 2)), "compute capability not supported"),
        (dict(head_size=512), "head_size not supported"),
        (dict(block_size=32), "block_size not supported"),
        (dict(kv_cache_dtype="bfloat16"), "kv_cache_dtype not supported"),
        (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype not supported"),
        (dict(dtype=torch.float16), "dtype not supported"),
        (dict(use_pcp=True), "PCP not supported"),
        (dict(has_sink=True), "attention sinks not supported"),
        (dict(vllm_config=config(index_topk=128)), "index_topk must be one of (512, 1024, 2048), but is 128"),
        (dict(vllm_config=config(index_topk=None)), "index_topk must be one of (512, 1024, 2048), but is None"),
        (dict(vllm_config=config(kv_lora_rank=256)), "kv_lora_rank must be 512, but is 256"),
    ],
)
def test_each_refusal_has_its_own_reason(package, more, reason):
    assert reasons(**more) == [reason]


def test_hisparse_is_refused(package):
    vllm_config = config()
    vllm_config.attention_config.hisparse_config = object()
    assert reasons(vllm_config=vllm_config) == ["HiSparse not supported"]


def test_not_for_other_attention(package):
    assert reasons(use_mla=False, use_sparse=False) == ["non-MLA not supported", "non-sparse not supported"]
    assert reasons(use_sparse=False) == ["non-sparse not supported"]


def test_package_missing(monkeypatch):
    monkeypatch.setattr(plans, "has_b12x", lambda: False)
    assert reasons() == ["the package b12x is missing: pip install 'vllm[b12x]'"]
    # On another GPU the package is not the reason.
    assert reasons(SM90) == ["compute capability not supported"]


def test_package_old(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.4.9" if name == "b12x" else version(name))
    assert reasons() == ["b12x 1.4.9 is too old, it must be at least 1.5.1"]


def test_package_cannot_be_imported(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'cutlass'")

    monkeypatch.setattr(plans, "b12x_module", fail)
    (reason,) = reasons()
    assert reason.endswith("cannot be imported: No module named 'cutlass'")


@pytest.mark.parametrize("module, name", [(module, name) for module, names in plans.B12X_NAMES.items() for name in names])
def test_package_lacks_a_name(package, monkeypatch, module, name):
    real = plans.b12x_module

    def without(module_name):
        found = real(module_name)
        return NS(**{n: getattr(found, n) for n in plans.B12X_NAMES[module_name] if (module_name, n) != (module, name)})

    monkeypatch.setattr(plans, "b12x_module", without)
    (reason,) = reasons()
    assert reason.endswith(f"has no {name} in {module}")


def test_package_without_its_gpu():
    (reason,) = reasons()
    assert reason.endswith("finds no SM120 or SM121 GPU, or no CuTe DSL to use")


# ------------------------------------------------------------------------------------------------ choice


def test_last_choice_and_only_on_sm12x():
    for capability in (SM120, SM121):
        assert _get_backend_priorities(True, capability)[-1] is AttentionBackendEnum.B12X_MLA_SPARSE
    for capability in (SM90, SM100):
        assert AttentionBackendEnum.B12X_MLA_SPARSE not in _get_backend_priorities(True, capability)
    assert AttentionBackendEnum.B12X_MLA_SPARSE not in _get_backend_priorities(False, SM120)


class SM120Platform(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return SM120


def choose(selected=None, vllm_config=None, **more):
    with current_config(vllm_config or config()):
        return SM120Platform.get_attn_backend_cls(selected, selector(**more)).rsplit(".", 1)[1]


@pytest.fixture(params=[True, False], ids=["flashinfer", "no-flashinfer"])
def flashinfer(request, monkeypatch):
    """Whether upstream's only sparse MLA backend for SM120 can run."""
    import vllm.utils.flashinfer as module

    monkeypatch.setattr(module, "has_flashinfer_sparse_mla_sm120", lambda: request.param)
    return request.param


def test_automatic_choice(package, flashinfer):
    """Upstream's choice wherever it has one."""
    upstream = "FlashInferMLASparseSM120Backend" if flashinfer else "B12xMLASparseBackend"
    assert choose(use_dcp=False) == upstream
    assert choose(use_dcp=False, kv_cache_dtype="fp8_ds_mla") == upstream
    assert choose(use_dcp=True) == "B12xMLASparseBackend"
    assert choose(use_dcp=False, kv_cache_dtype="nvfp4_ds_mla") == "B12xMLASparseBackend"
    assert choose(use_dcp=False, vllm_config=config(index_topk=1024)) == "B12xMLASparseBackend"
    assert choose(use_sparse=False, use_dcp=False) == "TritonMLABackend"


def test_no_choice_without_the_package(monkeypatch, flashinfer):
    monkeypatch.setattr(plans, "has_b12x", lambda: False)
    with pytest.raises(ValueError, match="B12X_MLA_SPARSE: .the package b12x is missing"):
        choose(use_dcp=True)


def test_asked_for(package, flashinfer):
    assert choose(AttentionBackendEnum.B12X_MLA_SPARSE, use_dcp=False) == "B12xMLASparseBackend"
    with pytest.raises(ValueError, match="block_size not supported"):
        choose(AttentionBackendEnum.B12X_MLA_SPARSE, block_size=16)


def test_attention_backend_flag_knows_the_name():
    from vllm.config.attention import AttentionConfig

    assert AttentionConfig(backend="B12X_MLA_SPARSE").backend is AttentionBackendEnum.B12X_MLA_SPARSE


# ------------------------------------------------------------------------------------------------ the layers


@pytest.mark.parametrize("asked, used", [("auto", "fp8_ds_mla"), ("fp8", "fp8_ds_mla"), ("fp8_e4m3", "fp8_ds_mla"), ("fp8_ds_mla",) * 2, ("nvfp4_ds_mla",) * 2])
def test_cache_format(asked, used):
    from vllm.model_executor.layers.attention.mla_attention import _canonicalize_sparse_mla_kv_cache_dtype

    assert _canonicalize_sparse_mla_kv_cache_dtype(Backend, asked) == used


@pytest.mark.parametrize("dtype, upstream, ours", [("fp8_ds_mla", 656, 656), ("nvfp4_ds_mla", 352, 368)])
@pytest.mark.parametrize("block_size", [64, 128])
def test_cache_spec(dtype, upstream, ours, block_size):
    """The pages of the KV cache have the records that the package reads, a whole number of 64 rows apart."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.uint8, cache_dtype_str=dtype, state_content_bytes=upstream)
    spec = Backend.customize_spec(spec)
    assert spec.state_content_size_bytes == ours and spec.page_size_bytes == block_size * ours
    assert spec.block_stride_alignment == 64 * ours


@pytest.mark.parametrize("own", [True, False])
def test_fused_layer_leaves_the_record_to_its_writer(monkeypatch, own):
    """The fused kernel knows upstream's nvfp4_ds_mla record only: it must not write a cache that holds others."""
    import vllm.models.deepseek_v32.attention as fused

    done = []
    cache, slots = torch.zeros(1), torch.zeros(2)
    metadata = object()
    context = NS(slot_mapping={"layer": slots}, attn_metadata=metadata, cudagraph_runtime_mode=None)
    monkeypatch.setattr(fused, "get_forward_context", lambda: context)
    monkeypatch.setattr(fused, "get_attention_context", lambda name: (metadata, None, None, None))

    class Stop(Exception):
        pass

    def norm_rope(*args, mla_kv_cache, **kwargs):
        done.append(("fused", mla_kv_cache))
        return args[1]

    def stop(*args):
        raise Stop

    monkeypatch.setattr(fused, "fused_norm_rope", norm_rope)
    norm = NS(weight=None, variance_epsilon=1e-6)
    impl = NS(prepare_for_batch=lambda metadata: None, **({"writes_own_records": True} if own else {}))
    layer = NS(
        fused_qkv_a_proj=lambda x: (torch.zeros(2, 8 + 512 + 64),),
        q_lora_rank=8,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        num_local_heads=1,
        v_head_dim=128,
        indexer=None,
        skip_topk=True,
        layer_name="layer",
        hisparse_cache=None,
        use_pcp=False,
        impl=impl,
        kv_cache=cache,
        _k_scale=None,
        _k_scale_float=1.0,
        kv_cache_dtype="nvfp4_ds_mla",
        q_a_layernorm=norm,
        kv_a_layernorm=norm,
        rotary_emb=NS(cos_sin_cache=None),
        topk_indices_buffer=None,
        _index_rope_interleave=False,
        _should_prepare_mqa_query=lambda *a: True,
        update_kv_cache=lambda kv_c, k_pe, kv_cache, slot_mapping, *rest: done.append(("own", kv_c.shape, k_pe.shape, kv_cache, slot_mapping)),
        q_b_proj=stop,
    )
    with pytest.raises(Stop):
        fused.DeepseekV32Attention.forward(layer, None, torch.zeros(2, 16))
    if own:
        assert done == [("fused", None), ("own", (2, 512), (2, 64), cache, slots)]
    else:
        assert done == [("fused", cache)]
