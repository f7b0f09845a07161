"""GGUF files: what they say of themselves, and the safetensors checkpoint of their shape."""
