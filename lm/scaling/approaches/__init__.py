"""Ways to a compute-optimal allocation besides the fitted surface."""
