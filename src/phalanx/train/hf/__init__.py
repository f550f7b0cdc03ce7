"""Hugging Face models: building, weights, inputs."""
