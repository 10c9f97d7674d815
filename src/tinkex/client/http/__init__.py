"""One HTTP exchange: connections, headers, encodings, retries and limits."""
