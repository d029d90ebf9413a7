"""One FP8 precision flow for training forward passes and rollouts."""
