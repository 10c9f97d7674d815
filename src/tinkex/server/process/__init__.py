"""The server as a process: settings, clock, log, threads, disk, and how it says no."""
