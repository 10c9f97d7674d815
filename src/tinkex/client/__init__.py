"""The SDK: config, transport, retries, limits, futures, and the five clients."""
