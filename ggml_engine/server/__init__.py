"""The HTTP server: what clients of OpenAI and Anthropic speak, over `ggml_engine.serving`. Needs the extra `server`."""
