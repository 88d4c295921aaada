"""Secure sums and Gram matrices: vectors, keys and messages; no methods, models or engines."""
