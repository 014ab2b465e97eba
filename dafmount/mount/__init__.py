"""The FUSE side: the only room that knows pyfuse3 and trio."""
