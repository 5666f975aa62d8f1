# SPDX-License-Identifier: Apache-2.0
"""cp_kv_cache_interleave_size: which values are refused, when, and what the deprecated dcp_ name does."""
import json
import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from vllm import logger as vllm_logger
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

pytestmark = [pytest.mark.base("v0.33.0")]

NAMES = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NIXL_IN_MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]},
}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def parallel_config(dcp=2, **kwargs):
    return ParallelConfig(tensor_parallel_size=dcp, decode_context_parallel_size=dcp, distributed_executor_backend="mp", **kwargs)


def vllm_config(block_size=16, connector=None, dcp=2, **kwargs):
    return VllmConfig(
        cache_config=CacheConfig(block_size=block_size),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=parallel_config(dcp, **kwargs),
        kv_transfer_config=KVTransferConfig(**connector) if connector else None,
    )


@pytest.fixture(scope="module")
def engine_parallel_config(tmp_path_factory):
    """ParallelConfig that the whole way from a command line builds, for a model folder that has only a config.json."""
    model = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 64}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 128}
    (model / "config.json").write_text(json.dumps({**llama, **sizes, "torch_dtype": "bfloat16"}))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", str(model), "--skip-tokenizer-init", "-tp", "2", "-dcp", "2", "--distributed-executor-backend", "mp"]

    def build(*argv):
        args = EngineArgs.from_cli_args(parser.parse_args([*common, *argv]))
        return args.create_engine_config().parallel_config

    return build


@pytest.fixture
def warnings():
    """What the config module warns about."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("vllm.config.parallel")
    logger.addHandler(handler)
    vllm_logger._print_warning_once.cache_clear()  # an earlier test may have warned the same
    yield messages
    logger.removeHandler(handler)


# ------------------------------------------------------------------------------------------------ block size


def allowed(block_size, interleave):
    """Brute force: whole runs of `interleave` tokens, one or more, fill the block."""
    filled = 0
    while interleave > 0 and filled < block_size:
        filled += interleave
    return filled == block_size


@pytest.mark.cases("interleave_validation")
def test_public_cases(case):
    block_size, interleave = case["block_size"], case["interleave"]
    assert allowed(block_size, interleave) is case["valid"]
    if case["valid"]:
        vllm_config(block_size, cp_kv_cache_interleave_size=interleave).validate_block_size()
    else:
        with pytest.raises(ValueError) as error:
            vllm_config(block_size, cp_kv_cache_interleave_size=interleave).validate_block_size()
        assert str(interleave) in str(error.value)
        # Behind the constructor's back, as set_kv_cache_layout assigns it on a worker.
        config = vllm_config(block_size)
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        with pytest.raises(ValueError) as error:
            config.validate_block_size()
        assert f"({block_size})" in str(error.value) and f"({interleave})" in str(error.value)


ANY_CONFIG = vllm_config()


@settings(max_examples=300, deadline=None)
@given(block_size=st.integers(1, 512), interleave=st.one_of(st.integers(-512, 512), st.integers(1, 16)), runs=st.none() | st.integers(1, 32))
def test_block_size_against_brute_force(block_size, interleave, runs):
    if runs is not None:  # a fair share of valid pairs
        block_size = runs * max(interleave, 1)
    config = ANY_CONFIG
    config.cache_config.block_size = block_size
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    if allowed(block_size, interleave):
        config.validate_block_size()
    else:
        with pytest.raises(ValueError) as error:
            config.validate_block_size()
        assert f"({block_size})" in str(error.value) and f"({interleave})" in str(error.value)


def test_without_dcp_the_size_does_not_matter():
    vllm_config(16, dcp=1, cp_kv_cache_interleave_size=48).validate_block_size()


# ------------------------------------------------------------------------------------------------ below 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, -64])
@pytest.mark.parametrize("dcp", [1, 2])
def test_sizes_below_one_are_refused_at_construction(name, value, dcp):
    with pytest.raises(ValidationError) as error:
        parallel_config(dcp, **{name: value})
    assert name in str(error.value) and f"input_value={value}" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_below_one_are_refused_from_the_command_line(name, engine_parallel_config):
    with pytest.raises(ValueError) as error:
        engine_parallel_config("--" + name.replace("_", "-"), "0")
    assert name in str(error.value) and "input_value=0" in str(error.value)


# ------------------------------------------------------------------------------------------------ the deprecated name


CASES = [  # given cp, given dcp, used size, warns
    (None, None, 1, False),
    (8, None, 8, False),
    (None, 8, 8, False),
    (None, 1, 1, False),
    (8, 8, 8, False),
    (16, 8, 16, True),
    (1, 8, 1, True),
    (8, 1, 8, True),
]


@pytest.mark.parametrize("cp, dcp, used, warns", CASES)
@pytest.mark.parametrize("way", ["config", "dict", "command-line"])
def test_deprecated_name(cp, dcp, used, warns, way, engine_parallel_config, warnings):
    given_sizes = {name: value for name, value in zip(NAMES, (cp, dcp)) if value is not None}
    if way == "config":
        config = parallel_config(**given_sizes)
    elif way == "dict":
        config = TypeAdapter(ParallelConfig).validate_python({"distributed_executor_backend": "mp", **given_sizes})
    else:
        config = engine_parallel_config(*(word for name, value in given_sizes.items() for word in ("--" + name.replace("_", "-"), str(value))))
        assert config._allow_auto_resolve_cp_interleave_size is (cp is None and dcp is None)  # an explicit size is explicit under its old name, too
    assert config.cp_kv_cache_interleave_size == used
    about = [message for message in warnings if "interleave" in message]
    assert len(about) == warns, about
    if warns:
        assert f"--cp-kv-cache-interleave-size={cp} is given and wins" in about[0]
        assert f"--dcp-kv-cache-interleave-size={dcp}" in about[0]


def test_a_conflict_warns_once(warnings):
    for _ in range(3):
        parallel_config(cp_kv_cache_interleave_size=16, dcp_kv_cache_interleave_size=8)
    assert len([message for message in warnings if "interleave" in message]) == 1


def test_an_applied_alias_does_not_come_back(warnings):
    """A copy with another size (the draft model's, for example) is neither overridden nor warned about."""
    config = parallel_config(dcp_kv_cache_interleave_size=8)
    assert replace(config).cp_kv_cache_interleave_size == 8
    assert replace(config, cp_kv_cache_interleave_size=4).cp_kv_cache_interleave_size == 4
    assert not [message for message in warnings if "interleave" in message]


def test_alias_is_checked_against_the_block_size():
    with pytest.raises(ValueError, match=r"\(16\).*\(3\)"):
        vllm_config(16, dcp_kv_cache_interleave_size=3).validate_block_size()


# ------------------------------------------------------------------------------------------------ KV connectors


GROUPS = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (64, 16)]


@pytest.mark.parametrize("connector", [NIXL, NIXL_IN_MULTI], ids=["nixl", "multi"])
@pytest.mark.parametrize("interleave, valid", [(1, True), (8, True), (16, True), (3, False), (32, False)])
def test_explicit_size_is_checked_under_nixl(connector, interleave, valid):
    config = vllm_config(16, connector, cp_kv_cache_interleave_size=interleave, _allow_auto_resolve_cp_interleave_size=False)
    config.adjust_dcp_kv_cache_interleave_size(GROUPS)
    assert config.parallel_config.cp_kv_cache_interleave_size == interleave
    if valid:
        config.validate_block_size()
    else:
        with pytest.raises(ValueError, match=rf"\(16\).*\({interleave}\)"):
            config.validate_block_size()


@pytest.mark.parametrize("sizes", [{}, {"cp_kv_cache_interleave_size": 3}, {"dcp_kv_cache_interleave_size": 3}], ids=["none", "cp", "dcp"])
def test_nixl_resolves_the_size_by_itself_as_upstream(sizes):
    config = vllm_config(16, NIXL, **sizes)
    config.validate_block_size()  # exempt: not final yet
    config.adjust_dcp_kv_cache_interleave_size(GROUPS)
    assert config.parallel_config.cp_kv_cache_interleave_size == 16
    config.validate_block_size()


def test_other_connectors_keep_the_alias():
    config = vllm_config(16, OFFLOADING, dcp_kv_cache_interleave_size=8)
    config.adjust_dcp_kv_cache_interleave_size(GROUPS)
    assert config.parallel_config.cp_kv_cache_interleave_size == 8


def test_other_connectors_are_no_exemption():
    with pytest.raises(ValueError, match=r"\(16\).*\(3\)"):
        vllm_config(16, OFFLOADING, cp_kv_cache_interleave_size=3).validate_block_size()
