"""kvass: keeps, ships and reuses the KV caches of language models, outside the engine."""
