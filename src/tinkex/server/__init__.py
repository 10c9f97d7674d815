"""The service: routes, sessions, lanes, futures and workers behind the Tinker wire protocol."""
