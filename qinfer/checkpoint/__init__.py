"""What is on disk: safetensors files, tokenizer, chat template, hub."""
