"""Packed shards: bytes in, values out. Opens no files, knows no Daf names."""
