"""Weight formats: quantize, pack, unpack, dequantize."""
