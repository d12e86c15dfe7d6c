"""From a source checkpoint to a quantized Hugging Face directory: read, plan, stream."""
