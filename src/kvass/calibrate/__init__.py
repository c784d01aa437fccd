"""Measures what an approximation costs a model, on held texts and planted facts."""
