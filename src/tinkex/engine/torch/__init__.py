"""The engine that computes with torch, on a CPU or a GPU."""
