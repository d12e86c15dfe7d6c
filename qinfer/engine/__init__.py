"""Turning prompts of token ids into new token ids."""
