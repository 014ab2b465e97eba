"""What a Daf data set contains: descriptors, element types, axes and properties."""
