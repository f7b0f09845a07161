"""What the tools of quantisation themselves store of a model; a test that asks needs its tool."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.checkpoint.quantised import FORMATS

TOOLS = {
    "fp8": "transformers",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "compressed-tensors": "compressed_tensors",
}
"""Packages that quantise on a CPU, by ``quant_method``."""
_NVFP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_NVFP4_INPUTS |= {"dynamic": "local"}
_MORE: dict[str, dict[str, Any]] = {
    "compressed-tensors nvfp4": {"input_activations": _NVFP4_INPUTS},
    "compressed-tensors mxfp8": {"weights": {"strategy": "group", "scale_dtype": "torch.uint8"}},
}
"""What a group of a config also says as its tool writes it."""
NAMES = (
    *("fp8 blocks", "fp8 tensor", "bitsandbytes nf4", "bitsandbytes int8"),
    *("torchao int8", "torchao float8", "compressed-tensors fp8 channel"),
    *("compressed-tensors fp8 blocks", "compressed-tensors int4", *_MORE),
)


def _complete(name: str) -> dict[str, Any]:
    config = copy.deepcopy(dict(FORMATS[name].config or {}))
    for part, more in _MORE.get(name, {}).items():
        config["config_groups"]["group_0"][part] |= more
    return config


SCHEMES = {name: _complete(name) for name in NAMES}
"""The ``quantization_config`` of each way to quantise that a tool has on a CPU."""


def count_quantised(model, scheme, folder: Path) -> int:
    """Bytes of what the scheme's tool stores of a model."""
    method = SCHEMES[scheme]["quant_method"]
    pytest.importorskip(TOOLS[method])
    quantised = {
        "fp8": quantise_fp8,
        "compressed-tensors": compress,
        "bitsandbytes": load_quantised,
        "torchao": load_quantised,
    }[method](model, copy.deepcopy(SCHEMES[scheme]), folder)
    state = {id(value): value for value in quantised.values()}
    return sum(value.nbytes for value in state.values())


def load_quantised(model, config, folder):
    """Quantise as transformers does while it loads a model, and save that."""
    model.save_pretrained(folder / "plain")
    if config["quant_method"] == "torchao":
        import torchao.quantization as torchao

        kind = getattr(torchao, config["quant_type"]["default"]["_type"])
        how = transformers.TorchAoConfig(kind())
    else:
        how = transformers.BitsAndBytesConfig(**{k: v for k, v in config.items() if k[0] != "q"})
    loaded = type(model).from_pretrained(
        folder / "plain", quantization_config=how, dtype=torch.bfloat16
    )
    loaded.save_pretrained(folder / "quantised")
    from safetensors.torch import load_file

    paths = sorted((folder / "quantised").glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def quantise_fp8(model, config, folder):
    """Make the modules that transformers loads an FP8 checkpoint into."""
    from transformers.quantizers import AutoHfQuantizer

    how = transformers.FineGrainedFP8Config(
        **{k: v for k, v in config.items() if k != "quant_method"}
    )
    quantizer = AutoHfQuantizer.from_config(how, pre_quantized=True)
    model = copy.deepcopy(model).to("meta")
    quantizer.preprocess_model(model=model)
    return model.state_dict(keep_vars=True)


def compress(model, config, folder):
    """Compress as llm-compressor does, which gives each routed expert layers of its own."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = copy.deepcopy(model)
    for name, module in [*model.named_modules()]:
        if name.endswith("experts"):
            divide_experts(module)
    how = QuantizationConfig.model_validate(config)
    apply_quantization_config(model, how)
    ModelCompressor(quantization_config=how).compress_model(model)
    return model.state_dict(keep_vars=True)


def divide_experts(experts):
    """Put linear layers in the place of matrices of all experts."""
    transposed = getattr(experts, "is_transposed", False)
    for name, stack in [*experts.named_parameters(recurse=False)]:
        if stack.ndim != 3:
            continue
        delattr(experts, name)
        for index, matrix in enumerate(stack.transpose(1, 2) if transposed else stack):
            for part in range(2 if name == "gate_up_proj" else 1):
                rows = matrix.shape[0] // (2 if name == "gate_up_proj" else 1)
                linear = nn.Linear(matrix.shape[1], rows, bias=False, dtype=stack.dtype)
                experts.add_module(f"{name}_{index}_{part}", linear)
