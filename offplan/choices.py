"""Words of which one is chosen, the same in a plan, in a call and on the command line."""

from typing import Literal

WorkloadName = Literal["chat", "agent", "batch"]
"""Usual workload, of which each number may be replaced."""
ObjectiveName = Literal["latency", "throughput"]
"""Aim of a plan: the time of one request, or tokens a second."""
PartsChoice = Literal["off", "auto"]
"""Choice of ``parts``: with ``auto`` rules may have prompts stream a layer's routed experts in
parts."""
DEFAULT_PARTS: PartsChoice = "auto"
"""Default of ``parts``.

Source: ``benchmarks/results/parts-h100.json`` and ``parts-h200.json``. Five prompts of two models
took 0.97 to 1.05 of the predicted time to the first token, and one of gpt-oss-20b 0.92. Without
parts, Mixtral-8x22B took 0.97 s in place of 0.66, DeepSeek-V2-Lite 0.42 in place of 0.39.
"""
KVCacheDtype = Literal["auto", "fp8"]
"""Type of the KV cache: as the model computes it, or in FP8. Source: vLLM ``--kv-cache-dtype``."""
DeviceName = Literal["cuda", "cpu"]
"""Device that a machine is measured on: its current CUDA device, or the CPU as one that plays
GPU."""
ExportFormat = Literal["command", "yaml", "env", "docker"]
"""Form in which an engine's command is written."""
WeightType = Literal["bfloat16", "float16", "float32"]
"""The type that weights are stored in, where they are not quantised."""
TableFormat = Literal["text", "markdown"]
"""Form in which tables are written."""
FileKind = Literal["plan", "profile"]
"""File that a schema is of, among those that people write."""
