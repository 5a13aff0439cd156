"""Replicated PyTorch models: equal weights at the start, one gradient for all afterwards."""
