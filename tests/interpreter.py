# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, mended where vLLM's kernels need it."""
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _with_bool_mask(access, place):
    def wrapped(*args):
        mask = TensorHandle(args[place].data.astype(bool), args[place].dtype)
        return access(*args[:place], mask, *args[place + 1 :])

    return wrapped


def accept_mixed_masks(set_attribute=setattr) -> None:
    """Triton 3.9's interpreter keeps a loaded bool as bool, a comparison as int8, and refuses a mask made of both."""
    for name, mask in (("create_masked_load", 2), ("create_masked_store", 3)):
        set_attribute(InterpreterBuilder, name, _with_bool_mask(getattr(InterpreterBuilder, name), mask))
