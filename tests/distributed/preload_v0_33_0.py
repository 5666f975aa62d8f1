# SPDX-License-Identifier: Apache-2.0
"""Imported in the parent of forked ranks: what each would import by itself, seconds for each rank and test."""
import vllm.model_executor.layers.attention.mla_attention  # noqa: F401
import vllm.models.deepseek_v32.attention  # noqa: F401
import vllm.v1.attention.backends.mla.flashmla_sparse  # noqa: F401
import vllm.v1.attention.backends.mla.indexer  # noqa: F401
import vllm.v1.core.sched.async_scheduler  # noqa: F401
import vllm.v1.worker.gpu.model_runner  # noqa: F401
import vllm.v1.worker.gpu_model_runner  # noqa: F401
