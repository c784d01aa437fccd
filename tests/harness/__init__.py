"""Helpers of the crash, concurrency and format suites."""
