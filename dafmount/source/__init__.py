"""Blocking, thread-safe access to bytes wherever they lie. Knows nothing of Daf."""
