# SPDX-License-Identifier: Apache-2.0
"""The patch-stack tool: see apply.py and cli/."""
