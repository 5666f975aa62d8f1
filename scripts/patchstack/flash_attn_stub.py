# SPDX-License-Identifier: Apache-2.0
"""What a layer bundle has in place of vllm/vllm_flash_attn/__init__.py and flash_attn_interface.py, whose extensions alone are 480 MB.

No version is supported, and whatever else is asked for is a function that raises: enough while every prefill of sparse MLA
goes through MQA (`attention_config={"sparse_mla_force_mqa": True, ...}`). The sub-packages beside it are the real ones.
"""
FA2_AVAILABLE = FA3_AVAILABLE = FA4_AVAILABLE = False
FA2_UNAVAILABLE_REASON = FA3_UNAVAILABLE_REASON = FA4_UNAVAILABLE_REASON = "the bundle of vllm-dcp-stack leaves flash-attention out"


def is_fa_version_supported(fa_version, *args, **kwargs):
    return False


def fa_version_unsupported_reason(fa_version, *args, **kwargs):
    return FA2_UNAVAILABLE_REASON


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"vllm.vllm_flash_attn.{name}: {FA2_UNAVAILABLE_REASON}")

    missing.__name__ = name
    return missing
