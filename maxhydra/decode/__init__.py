"""The decode engine (continuous batching over a paged KV cache), offline decoding, chat, and the HTTP server."""
