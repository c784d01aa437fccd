"""Codecs: a chunk's arrays to arrays that are stored, and back; one codec a file."""
