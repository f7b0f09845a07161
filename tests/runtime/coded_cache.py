"""A cache in FP8, and a prompt that fills some of it."""

from dataclasses import replace

import torch

from offplan.capabilities.way import OWN

FP8 = replace(OWN, kv_cache_dtype="fp8")
PROMPT = torch.tensor([[number * number % 61 for number in range(23)]] * 2)
"""Of two sequences."""
