"""What an account has: checkpoints, usage, audit."""
