"""ggml-engine: GGUF language models in a Python process, many sessions on one KV cache."""
