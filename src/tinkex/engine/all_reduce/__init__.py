"""The sum of the gradients of engines that share an adapter: an all-reduce in a process group."""
