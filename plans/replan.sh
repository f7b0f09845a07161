#!/bin/sh
# Makes every plan in this folder again, and the pictures of two of them in docs.
# tests/test_plans.py runs the same lines, or prices what they plan, and compares byte for byte.
set -eu
cd "$(dirname "$0")"
offplan plan tiny-moe --machine cpu --gpu-memory 1MiB --prompt-tokens 32 --output-tokens 96 --context 256 --force -o tiny-moe.yaml
offplan plan ../tests/models/deepseek-v2-lite/config.json --source deepseek-ai/DeepSeek-V2-Lite --machine h200-pcie5 --gpu-memory 16GiB --force -o deepseek-v2-lite-h200-16gib.yaml
offplan plan ../tests/models/deepseek-v2-lite/config.json --source deepseek-ai/DeepSeek-V2-Lite --machine rtx4090-pcie4 --gpu-memory 24GiB --force -o deepseek-v2-lite-rtx4090-24gib.yaml
offplan plan ../tests/models/qwen3-8b/config.json --source Qwen/Qwen3-8B --machine h200-pcie5 --gpu-memory 12GiB --no-packing --no-host-cores --force -o qwen3-8b-h200-12gib.yaml
offplan plan ../tests/models/qwen3-8b/config.json --source Qwen/Qwen3-8B --machine h200-pcie5 --gpu-memory 8GiB --force -o qwen3-8b-h200-8gib.yaml
offplan analyze ../tests/models/qwen3-8b/config.json --source Qwen/Qwen3-8B --machine h200-pcie5 --gpu-memory 12GiB --no-packing --no-host-cores --quiet --force --svg ../docs/qwen3-8b-h200-12gib.svg > /dev/null
offplan analyze ../tests/models/qwen3-8b/config.json --source Qwen/Qwen3-8B --machine h200-pcie5 --gpu-memory 8GiB --quiet --force --svg ../docs/qwen3-8b-h200-8gib.svg > /dev/null
