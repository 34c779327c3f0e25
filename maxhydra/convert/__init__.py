"""Weights of other formats, by name tables: Hugging Face folders and GGUF files, to and from the plain tree."""
