"""The numeric operations under the decoder, and the choice of their backend."""
