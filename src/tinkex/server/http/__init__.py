"""One HTTP request: its body read within limits, its handler, its answer."""
