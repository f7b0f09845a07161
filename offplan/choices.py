"""Words of which one is chosen, the same in a plan, in a call and on the command line."""

from typing import Literal

Store = Literal["host", "peer"]
"""Where what is offloaded lies: in pinned host memory, or in that of a second GPU."""
ObjectiveName = Literal["latency", "throughput"]
"""What a plan is best at: the time of one request, or tokens a second."""
DeviceName = Literal["cuda", "cpu"]
"""What a machine is measured on: its current CUDA device, or the CPU as one that plays GPU."""
ExportFormat = Literal["command", "yaml", "env", "docker"]
"""How an engine's command is written."""
WeightType = Literal["bfloat16", "float16", "float32"]
"""The type that weights are stored in, where they are not quantised."""
TableFormat = Literal["text", "markdown"]
"""How tables are written."""
FileKind = Literal["plan", "profile"]
"""Which of the files that people write a schema is of."""
