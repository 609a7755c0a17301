"""Convolution, pooling, resampling and the norms of images."""
