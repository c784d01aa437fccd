"""Policies: pure functions of facts and time. No clock, thread or file."""
