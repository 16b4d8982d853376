"""What can be measured of two arrays, in one pass over them."""
