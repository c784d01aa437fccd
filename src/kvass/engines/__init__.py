"""One package an engine: what reads KV out of it and puts KV into it."""
