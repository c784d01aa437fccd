"""The benchmarks behind every figure in the README: ratios, measured side by side in one run."""
