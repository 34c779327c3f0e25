"""The decode engine: continuous batching over a paged cache; text in and out; the server."""
