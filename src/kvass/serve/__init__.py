"""The server: an OpenAI-compatible API over the transformers engine, with tenants."""
