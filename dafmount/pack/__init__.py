"""Writing data sets: what is packed, and directories, archives and groups that appear only when they are complete."""
