"""The commands: argv in, exit code out."""
