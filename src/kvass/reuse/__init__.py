"""Reuse anywhere in a prompt: KV of texts that were read elsewhere, moved, put together and repaired."""
