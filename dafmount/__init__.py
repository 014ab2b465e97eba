"""Mount Daf data sets, packed or flat, local or in a ZIP archive, as plain flat files."""

__version__ = "0.1.0"
