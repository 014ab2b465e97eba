"""What a Daf data set looks like when mounted: directories, files and their bytes."""
