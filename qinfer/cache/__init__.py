"""The key-value cache: blocks of 32 tokens that sequences share, in 16, 8 or 4 bits."""
