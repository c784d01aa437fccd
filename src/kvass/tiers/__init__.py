"""Tiers: where objects are kept; one tier a file, one contract, one conformance suite."""
